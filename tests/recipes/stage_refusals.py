"""Arguments of the stages that no training recipe takes, beside whatever it needs otherwise."""

STAGES_REFUSED = [
    (["--distil_steps", "1"], "--distil_steps needs a teacher"),
    (["--transfer_steps", "1", "--redraw_every", "2"], "--redraw_every would undo what"),
    (["--learnable", "projections", "--recalibrate_every", "2"], "--recalibrate_every would undo what"),
    (["--kd_weight", "0.5"], "--kd_weight needs a teacher"),
    (["--teacher", "x", "--kd_weight", "1.5"], "--kd_weight is a share and must be at most 1, got 1.5"),
    (["--teacher", "x", "--twin"], "two softmax models"),
    (["--transfer_steps", "1", "--attention", "relu"], "choose --attention favor.* got relu"),
    (["--transfer_steps", "1", "--attention", "softmax"], "choose --attention favor.* got softmax"),
    (["--transfer_steps", "1", "--attention", "none", "--exact_window", "4"], "choose --attention favor.* got none"),
]
