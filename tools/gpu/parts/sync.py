"""Measures the checksums of `stability.sync_check` over the weights of an MoE, and compares them with a CPU's."""

import torch
from measuring import alternating

from gpu.bandwidth import share_of_peak
from gpu.models import build, config_of
from gpu.record import Place, Record
from verl_ext.core.checksums import TensorRecorder, checksum

COMPARED = 20  # tensors


def run(record: Record, place: Place) -> None:
    with record.trying("qwen3_moe"):
        model = build(config_of("qwen3_moe", tiny=place.tiny, attention="eager"), torch.bfloat16, place.device)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def record_all() -> None:
            recorder = TensorRecorder()
            for name, tensor in weights.items():
                recorder.add(name, tensor)
            recorder.close()

        several = list(weights.items())[:: max(len(weights) // COMPARED, 1)]
        wrong = [name for name, tensor in several if int(checksum(tensor)) != int(checksum(tensor.cpu()))]
        record.check("checksums = a CPU's", not wrong, ", ".join(wrong))
        size = sum(tensor.nbytes for tensor in weights.values())
        name = f"checksums and sums of {size / 1e9:.2f} GB"
        spent = alternating({name: record_all}, place.repeats, place.device)
        record.times(spent)
        share_of_peak(record, "share of peak bandwidth, reading each weight twice", 2 * size, spent[name])
