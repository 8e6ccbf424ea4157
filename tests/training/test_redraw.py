"""Redraws in training: when they happen, that they are the same everywhere, and that nothing else notices them."""

import pytest
import torch
from processes import run_two_ranks
from tiny_models import hidden_states, tiny_model, token_batch
from torch import nn
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from hf_favorpp import FavorppCallback, FavorppConfig, RedrawSchedule, convert_to_favorpp
from hf_favorpp.errors import ConversionError
from hf_favorpp.nn import converted_layers

EVERY_TWO = FavorppConfig(num_features=16, redraw=RedrawSchedule(every=2))


@pytest.fixture
def model():
    return convert_to_favorpp(tiny_model("bert"), EVERY_TWO).train()


def draws(model):
    return [int(layer.draw_index) for layer in converted_layers(model)]


def omegas(model):
    return [layer.omega.clone() for layer in converted_layers(model)]


# --- the schedule -------------------------------------------------------------------------------------------------


def test_a_draw_lasts_for_as_many_optimizer_steps_as_the_schedule_says():
    schedule = RedrawSchedule(every=3)
    assert [schedule.draw_index(step) for step in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_after_until_the_draw_stays():
    schedule = RedrawSchedule(every=3, until=7)
    assert [schedule.draw_index(step) for step in (5, 6, 7, 8, 9, 1000)] == [1, 2, 2, 2, 2, 2]
    assert RedrawSchedule(every=3, until=0).draw_index(1000) == 0


# --- one redraw ---------------------------------------------------------------------------------------------------


def test_a_redraw_changes_directions_and_norms_in_every_head_and_layer(model):
    before = omegas(model)
    FavorppCallback().step(model, 2)
    for old, new in zip(before, omegas(model), strict=True):
        assert not torch.isclose(old.norm(dim=-1), new.norm(dim=-1)).any()
        cosine = nn.functional.cosine_similarity(old, new, dim=-1)
        assert cosine.abs().max() < 0.99
    first, second = omegas(model)
    assert not torch.isclose(first, second).any()
    assert not torch.isclose(first[0], first[1]).any()


def test_a_redraw_is_in_place_and_outside_of_the_graph(model):
    layer = converted_layers(model)[0]
    omega, draw_index = layer.omega, layer.draw_index
    FavorppCallback().step(model, 2)
    assert layer.omega is omega
    assert layer.draw_index is draw_index
    assert not omega.requires_grad


def test_a_redraw_is_the_same_whatever_came_before(model):
    callback = FavorppCallback()
    for step in range(7):
        callback.step(model, step)
    late = convert_to_favorpp(tiny_model("bert"), EVERY_TWO).train()
    callback.step(late, 6)
    assert all(torch.equal(one, other) for one, other in zip(omegas(model), omegas(late), strict=True))
    callback.step(model, 0)
    fresh = convert_to_favorpp(tiny_model("bert"), EVERY_TWO)
    assert all(torch.equal(one, other) for one, other in zip(omegas(model), omegas(fresh), strict=True))


def test_a_redraw_neither_reads_nor_changes_the_global_random_state(model):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    FavorppCallback().step(model, 2)
    assert torch.equal(torch.get_rng_state(), state)
    first = omegas(model)
    torch.manual_seed(2)
    converted_layers(model)[0].redraw_(0)
    converted_layers(model)[0].redraw_(1)
    assert torch.equal(converted_layers(model)[0].omega, first[0])


# --- the hand-written loop ----------------------------------------------------------------------------------------


def test_a_hand_written_loop_redraws_when_due_and_is_told_so(model):
    callback, optimizer, batch = FavorppCallback(), torch.optim.SGD(model.parameters(), lr=0.01), token_batch(9, 5)
    history = []
    for completed_steps in range(5):
        redrawn = callback.step(model, completed_steps)
        model(**batch).last_hidden_state.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append((redrawn, *draws(model)))
    assert history == [(False, 0, 0), (False, 0, 0), (True, 1, 1), (False, 1, 1), (True, 2, 2)]


def test_nothing_is_redrawn_in_eval_mode(model):
    model.eval()
    before, batch = omegas(model), token_batch(9, 5)
    output = hidden_states(model, batch)
    assert FavorppCallback().step(model, 100) is False
    assert all(torch.equal(old, new) for old, new in zip(before, omegas(model), strict=True))
    assert torch.equal(hidden_states(model, batch), output)


def test_without_a_schedule_nothing_is_redrawn():
    model = convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=16)).train()
    assert FavorppCallback().step(model, 100) is False
    assert draws(model) == [0, 0]


def test_the_schedule_of_the_callback_goes_before_that_of_the_model(model):
    FavorppCallback(RedrawSchedule(every=10)).step(model, 25)
    assert draws(model) == [2, 2]


def test_a_compiled_model_is_redrawn_in_training_and_not_in_evaluation(model):
    compiled = torch.compile(model, backend="eager")
    compiled.train()
    assert FavorppCallback().step(compiled, 2) is True
    assert draws(model) == [1, 1]
    compiled.eval()
    assert FavorppCallback().step(compiled, 4) is False
    assert draws(model) == [1, 1]


def test_a_model_that_is_not_converted_is_refused():
    with pytest.raises(ConversionError, match="nothing to redraw: the model is not converted"):
        FavorppCallback().step(tiny_model("bert").train(), 0)


# --- Trainer ------------------------------------------------------------------------------------------------------


class Sentences(torch.utils.data.Dataset):
    """Twelve random sentences with labels."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        batch = token_batch(3 + index % 5, length=8, seed=index)
        return {name: tensor[0] for name, tensor in batch.items()} | {"labels": torch.tensor(index % 2)}


def trainer(folder, callback=None, config=EVERY_TWO, **arguments):
    model = tiny_model("bert", AutoModelForSequenceClassification)
    if config is not None:
        convert_to_favorpp(model, config)
    defaults = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return Trainer(
        model,
        TrainingArguments(**{**defaults, **arguments}),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=[FavorppCallback() if callback is None else callback],
    )


def record_draws(model):
    """Return a list that receives (training, draw_index) at every forward of the first converted layer."""
    records = []
    converted_layers(model)[0].register_forward_pre_hook(
        lambda layer, _: records.append((layer.training, int(layer.draw_index)))
    )
    return records


def test_trainer_redraws_between_optimizer_steps_and_neither_within_one_nor_in_evaluation(tmp_path):
    run = trainer(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=12)
    records = record_draws(run.model)
    run.train()
    expected = []
    for step in range(6):
        expected += [(True, step // 2)] * 2  # two micro-batches under one draw
        expected += [(False, step // 2)]  # evaluated with the projections that were just trained
    assert records == expected


def test_trainer_stops_to_redraw_after_until(tmp_path):
    run = trainer(tmp_path, FavorppCallback(RedrawSchedule(every=1, until=3)))
    records = record_draws(run.model)
    run.train()
    assert [draw for _, draw in records] == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3]


def test_a_resumed_run_ends_with_the_same_weights_and_projections(tmp_path):
    whole = trainer(tmp_path / "whole", save_strategy="steps", save_steps=3)
    whole.train()
    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert draws(resumed.model) == draws(whole.model) == [2, 2]
    expected = whole.model.state_dict()
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_checkpoint_of_trainer_loads_with_the_projections_that_it_was_trained_with(tmp_path):
    run = trainer(tmp_path, save_strategy="steps", save_steps=3)
    run.train()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-3")
    assert draws(loaded) == [1, 1]
    final = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-6")
    batch = token_batch(7, 4)
    with torch.no_grad():
        assert torch.equal(final(**batch).logits, run.model.eval()(**batch).logits)


def test_redraws_leave_the_random_state_of_training_alone(tmp_path):
    class Noise(FavorppCallback):
        def __init__(self, schedule):
            super().__init__(schedule)
            self.values = []

        def on_step_end(self, args, state, control, **kwargs):
            self.values.append(float(torch.rand(())))

    often, never = Noise(RedrawSchedule(every=1)), Noise(RedrawSchedule(every=1000))
    trainer(tmp_path / "often", often).train()
    trainer(tmp_path / "never", never).train()
    assert often.values == never.values


def test_trainer_with_a_model_that_is_not_converted_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="nothing to redraw"):
        trainer(tmp_path, config=None).train()


# --- two ranks ----------------------------------------------------------------------------------------------------


def train_on_one_of_two_ranks(rank, folder):
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # ranks whose random states differ must agree nevertheless
    torch.distributed.init_process_group("gloo")
    model = convert_to_favorpp(tiny_model("bert"), EVERY_TWO).train()
    # without the broadcast of buffers that DDP does by default, only a draw that is the same everywhere can agree
    wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)
    callback, optimizer = FavorppCallback(), torch.optim.SGD(model.parameters(), lr=0.01)
    batch = token_batch(9, 5 + rank, seed=rank)
    for completed_steps in range(5):
        callback.step(wrapped, completed_steps)
        wrapped(**batch).last_hidden_state.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_train_with_the_same_projections_and_end_with_the_same_weights(tmp_path):
    run_two_ranks(train_on_one_of_two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert int(first["encoder.layer.0.attention.self.favorpp.draw_index"]) == 2
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    start = tiny_model("bert").state_dict()
    assert not torch.equal(first["encoder.layer.0.output.dense.weight"], start["encoder.layer.0.output.dense.weight"])
