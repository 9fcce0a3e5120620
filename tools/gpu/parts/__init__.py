"""The parts, most valuable first: their subject, their time limit, and the packages that they need."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part of the measurements.

    Attributes:
        title: for the page.
        module: has `run(record, place)`, and is imported in a process of its own.
        seconds: its time limit; the part starts only if this much is left of the budget.
        needs: packages without which it is not run.
        on_gpu_alone: whether a dry run leaves it out.
    """

    title: str
    module: str
    seconds: float
    needs: tuple[str, ...] = ("torch",)
    on_gpu_alone: bool = False


PARTS = {
    "overlap": Part("Expert overlap: the Triton kernel", "gpu.parts.overlap", 80, ("torch", "triton")),
    "measure": Part("One pass over the batch: mismatch and weights", "gpu.parts.measure", 70),
    "capture": Part(
        "Capture and replay of routing", "gpu.parts.capture", 230, ("torch", "transformers", "verl", "tensordict")
    ),
    "reuse": Part("One forward pass less", "gpu.parts.reuse", 120, ("torch", "transformers", "verl", "tensordict")),
    "sync": Part("Checksums of a weight sync", "gpu.parts.sync", 60, ("torch", "transformers")),
    "numbers": Part("The mismatch between kernels of one model", "gpu.parts.numbers", 70, ("torch", "transformers")),
    "oracles": Part("The mathematics against float64", "gpu.parts.oracles", 60, ("torch", "pytest")),
    "stack": Part("A short run with vLLM", "gpu.parts.stack", 500, ("torch", "verl", "ray", "vllm"), on_gpu_alone=True),
}
