"""Speech encoders with relative positions: converted without a bias of all pairs, exact within the window."""

import importlib
import math

import pytest
import torch
import transformers
from test_media_families import of_this_version, relative_error
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from hf_favorpp import (
    FavorppConfig,
    approximation_report,
    attention_matrix,
    convert_to_favorpp,
    revert_to_softmax,
)
from hf_favorpp.errors import InputError
from hf_favorpp.nn import converted_layers

F64 = torch.float64
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SPECTRA = {"feature_projection_input_dim": 10, "conv_depthwise_kernel_size": 3}
DISTANCES = {"left_max_position_embeddings": 6, "right_max_position_embeddings": 2}
SEAMLESS = {
    **SPECTRA,
    **{"hidden_size": 16, "speech_encoder_layers": 2, "speech_encoder_attention_heads": 2},
    **{"speech_encoder_intermediate_size": 24, "adaptor_kernel_size": 4, "adaptor_stride": 2, "num_adapter_layers": 1},
}
WAVES = {
    **SIZES,
    **{"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4), "feat_extract_norm": "layer"},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "conv_depthwise_kernel_size": 1},
}
MODELS = {
    "conformer": ("wav2vec2-conformer", "Wav2Vec2ConformerModel", {**WAVES, "position_embeddings_type": "relative"}),
    "bert, relative": (
        "wav2vec2-bert",
        "Wav2Vec2BertModel",
        SIZES | SPECTRA | {"position_embeddings_type": "relative"},
    ),
    "bert, relative key": (
        "wav2vec2-bert",
        "Wav2Vec2BertModel",
        SIZES | SPECTRA | DISTANCES | {"position_embeddings_type": "relative_key"},
    ),
    "seamless": ("seamless_m4t", "SeamlessM4TSpeechEncoder", {**SEAMLESS, "position_embeddings_type": "relative"}),
    "seamless v2": (
        "seamless_m4t_v2",
        "SeamlessM4Tv2SpeechEncoder",
        SEAMLESS | DISTANCES | {"position_embeddings_type": "relative_key", "speech_encoder_chunk_size": 4000},
    ),
    "parakeet": (
        "parakeet_encoder",
        "ParakeetEncoder",
        SIZES | {"num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 1, "num_key_value_heads": 2},
    ),
    "speecht5": (
        "speecht5",
        "SpeechT5EncoderWithSpeechPrenet",
        {
            **{name: size for name, size in WAVES.items() if name not in SIZES and "depthwise" not in name},
            **{"hidden_size": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24},
            **{"encoder_max_relative_position": 6, "encoder_layerdrop": 0.0},
            "num_conv_pos_embeddings": 1,  # this convolution mixes padded frames into real ones
        },
    ),
}
RELATIVE_TYPES = (
    "wav2vec2-conformer",
    "wav2vec2-bert",
    "seamless_m4t",
    "seamless_m4t_v2",
    "parakeet_encoder",
    "parakeet_ctc",
    "speecht5",
)
KEYS = ("bert, relative key", "seamless v2", "speecht5")
"""Those with embeddings of clipped distances; the others have positions of Transformer-XL."""
every_model = pytest.mark.parametrize("name", MODELS)


def relative_model(name, **options):
    model_type, architecture, sizes = MODELS[name]
    if not hasattr(transformers, model_type) and model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"the installed Transformers has no {model_type}")
    module = getattr(transformers, architecture, None)
    if module is None:
        modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        module = getattr(modeling, architecture)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = of_this_version(module(AutoConfig.for_model(model_type, **{**sizes, **options})).eval())
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            if "bias_u" in parameter_name or "bias_v" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.5)
    return model


def batch_of(name, frames=60, rows=2):
    generator = torch.Generator().manual_seed(1)
    if name in ("conformer", "speecht5"):
        return {"input_values": torch.randn(rows, 20 * frames + 20, generator=generator)}
    if name == "parakeet":
        return {"input_features": torch.randn(rows, 8 * frames, 16, generator=generator)}
    return {"input_features": torch.randn(rows, frames, 10, generator=generator)}


def padded(name):
    """A batch whose second row is shorter."""
    batch = batch_of(name)
    (tensor,) = batch.values()
    mask = torch.ones(tensor.shape[:2], dtype=torch.long)
    mask[1, tensor.shape[1] * 2 // 3 :] = 0
    return batch | {"attention_mask": mask}


def hidden(model, batch):
    with torch.no_grad():
        return model(**batch).last_hidden_state


@every_model
def test_more_features_come_closer_to_softmax(name):
    model, batch = relative_model(name), batch_of(name)
    softmax, errors = hidden(model, batch), []
    for num_features in (16, 4096):
        convert_to_favorpp(model, FavorppConfig(num_features=num_features, preconditioning="diagonal", exact_window=4))
        errors.append(relative_error(hidden(model, batch), softmax))
        revert_to_softmax(model)
    assert errors[1] < (0.5 if name in KEYS else 0.8) * errors[0]  # far positions are averaged
    assert errors[1] < (0.25 if name in KEYS else 0.4)


@every_model
@pytest.mark.parametrize("masked", [False, True])
def test_within_the_window_outputs_and_gradients_are_those_of_softmax(name, masked):
    """With the bias of all pairs in memory, in float64."""
    options = {"add_adapter": False} if "seamless" in name else {}  # an adapter mixes padded frames into real ones
    model, batch = relative_model(name, **options).double(), padded(name) if masked else batch_of(name)
    batch = {key: t.double() if t.is_floating_point() else t for key, t in batch.items()}
    results = []
    for convert in (False, True):
        if convert:
            convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=80))
        model.zero_grad()
        out = model(**batch).last_hidden_state
        rows = out[:, : out.shape[1] * 2 // 3 - 4] if masked else out
        rows.pow(3).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((rows.detach(), grads))
    (softmax, wanted), (found, grads) = results
    assert relative_error(found, softmax) < 1e-5
    positions = ("linear_pos.weight", "pos_bias_u", "pos_bias_v", "distance_embedding.weight", "bias_v", "pe_k.weight")
    assert any(n.endswith(positions) for n in wanted)
    for n, grad in wanted.items():
        assert grads[n] is not None, n
        assert (grads[n] - grad).norm() <= 1e-4 * grad.norm() + 1e-8, n


@every_model
def test_reverted_saved_and_loaded(name, tmp_path):
    model, batch = relative_model(name), batch_of(name)
    softmax, state = hidden(model, batch), {key: t.clone() for key, t in model.state_dict().items()}
    convert_to_favorpp(model, FavorppConfig(num_features=4, exact_window=4, exact_ends=(1, 1)))
    out = hidden(model, batch)
    assert relative_error(out, softmax) > 0.05
    model.save_pretrained(tmp_path)
    assert torch.equal(hidden(type(model).from_pretrained(tmp_path).eval(), batch), out)
    before = "eager" if name == "speecht5" else "sdpa"
    plain = type(model).from_pretrained(tmp_path, attn_implementation=before).eval()
    assert torch.equal(hidden(plain, batch), softmax)
    for implementation, expected in ((before, softmax), ("favorpp", out)):  # features are there, and not used at first
        if name == "speecht5":  # of which Transformers lets nobody set it
            model.config._attn_implementation = implementation
        else:
            model.set_attn_implementation(implementation)
        assert torch.equal(hidden(model, batch), expected)
    revert_to_softmax(model)
    assert torch.equal(hidden(model, batch), softmax)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[key]) for key, t in model.state_dict().items())


@every_model
@pytest.mark.parametrize("window", [0, 16])
def test_padding_changes_nothing(name, window):
    model, batch = relative_model(name), padded(name)
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=window))
    before = hidden(model, batch)
    (inputs,) = (key for key in batch if key != "attention_mask")
    real = int(batch["attention_mask"][1].sum())
    batch[inputs] = batch[inputs].clone()
    batch[inputs][1, real:] = torch.randn_like(batch[inputs][1, real:])
    frames = int(before.shape[1] * real / batch[inputs].shape[1]) - 4
    torch.testing.assert_close(hidden(model, batch)[1, :frames], before[1, :frames], rtol=1e-4, atol=1e-5)


@every_model
def test_some_layers_only(name):
    model, batch = relative_model(name), batch_of(name)
    softmax = hidden(model, batch)
    convert_to_favorpp(model, FavorppConfig(num_features=16, layers=(1,), exact_window=80))
    assert [layer.layer for layer in converted_layers(model)] == [1]
    assert relative_error(hidden(model, batch), softmax) < 1e-4


@every_model
def test_calibrated_and_measured(name):
    model, batch = relative_model(name), batch_of(name)
    config = FavorppConfig(num_features=256, preconditioning="diagonal", exact_window=4)
    convert_to_favorpp(model, config, calibration_data=[batch])
    assert all(layer.calibrated for layer in converted_layers(model))
    report = approximation_report(model, batch)
    assert report.layer_errors[0] < 0.6 * report.layer_uniform_errors[0]
    maps = attention_matrix(model, batch, layer=0)
    torch.testing.assert_close(maps.softmax.sum(-1), torch.ones_like(maps.softmax.sum(-1)))
    assert (maps.softmax - maps.converted).abs().max() > 1e-3
    revert_to_softmax(model)
    torch.testing.assert_close(attention_matrix(model, batch, layer=0).softmax, maps.softmax, rtol=1e-3, atol=1e-5)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor holds that anything returns."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0) if sizes else self.numbers
        return out


@every_model
@pytest.mark.parametrize("window", [0, 16])
def test_work_and_memory_are_linear_in_length(name, window):
    """The exponent is fitted; that of softmax on the same lengths is far above."""
    model = relative_model(name)
    batches = {frames: batch_of(name, frames, rows=1) for frames in (400, 1600)}

    def exponents():
        flops, largest = [], []
        for batch in batches.values():
            with FlopCounterMode(display=False) as counter, Largest() as memory:
                hidden(model, batch)
            flops.append(counter.get_total_flops())
            largest.append(memory.numbers)
        return (math.log(after / before, 4) for before, after in (flops, largest))

    softmax_work, softmax_memory = exponents()
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=window))
    work, memory = exponents()
    assert work < 1.08
    assert memory < 1.08
    assert softmax_work > 1.4
    assert softmax_memory > 1.8


def test_a_parakeet_that_recognises():
    encoder = {**MODELS["parakeet"][2], "initializer_range": 0.2}
    config = AutoConfig.for_model("parakeet_ctc", encoder_config=encoder, vocab_size=12)
    model, batch = of_this_version(transformers.AutoModelForCTC.from_config(config).eval()), batch_of("parakeet")
    with torch.no_grad():
        softmax = model(**batch).logits
        convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=80))
        assert relative_error(model(**batch).logits, softmax) < 1e-5
    assert len(converted_layers(model)) == 2


def test_chunks_that_keep_frames_apart_are_refused():
    model, batch = relative_model("seamless v2", speech_encoder_chunk_size=20), batch_of("seamless v2")
    hidden(model, batch)
    convert_to_favorpp(model, FavorppConfig(num_features=16))
    with pytest.raises(InputError, match="takes a padding mask"):
        hidden(model, batch)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_on_the_projection_of_positions_count():
    peft = pytest.importorskip("peft")
    model = relative_model("conformer")
    options = peft.LoraConfig(target_modules=["linear_pos", "linear_q"], init_lora_weights=False, r=2)
    model, batch = peft.get_peft_model(model, options).eval(), batch_of("conformer")
    softmax = hidden(model, batch)
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=80))
    assert relative_error(hidden(model, batch), softmax) < 1e-4
