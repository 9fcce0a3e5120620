"""Our policy losses and the `_target_` of their settings, for what asks without building them, which needs verl."""

_MODULE = "verl_ext.workers.loss_config"
LOSSES = {
    "icepop": f"{_MODULE}.IcePopLossConfig",
    "opsm": f"{_MODULE}.OpsmLossConfig",
    "llds": f"{_MODULE}.LldsLossConfig",
    "router_shift": f"{_MODULE}.RouterShiftLossConfig",
}
