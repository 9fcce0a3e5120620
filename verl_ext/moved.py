"""Old names of modules, where configs, scripts and installed entry points may still hold them."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

MOVED = {
    "verl_ext.platform.weights": "verl_ext.cpu.weights",  # checkpoint_engine.custom_backend_module
    "verl_ext.rewards": "verl_ext.core.rewards",  # a reward manager of one's own
    "verl_ext.rollout.vllm_plugin": "verl_ext.upstream.vllm_plugin",  # the entry point of an older installation
    "verl_ext.routing_cost": "verl_ext.plan.routing",  # python -m
    "verl_ext.plan.routing_cost": "verl_ext.plan.routing",  # python -m
}
GONE = ("verl_ext.platform", "verl_ext.rollout")


class MovedModules:
    """The last of Python's finders: it is asked for what no file has."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in MOVED and name not in GONE:
            return None
        return ModuleSpec(name, self, is_package=name in GONE)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None: ...

    def exec_module(self, module: ModuleType) -> None:
        """Put the one module under its old name as well: a second one would register everything again."""
        if module.__name__ in MOVED:
            sys.modules[module.__name__] = import_module(_said(module.__name__))

    def get_code(self, name: str) -> CodeType:
        """What `python -m` runs."""
        return compile(f"import runpy; runpy.run_module('{_said(name)}', run_name='__main__')", __file__, "exec")


def install() -> None:
    sys.meta_path.append(MovedModules())


def _said(old: str) -> str:
    new = MOVED[old]
    print(
        f"verl_ext: {old} is {new} now; write the new name (in an installed entry point: install verl_ext again)",
        file=sys.stderr,
    )
    return new
