"""The architecture, held: who may import whom, where each vendor lives, and what importing costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "echo_protocols": ROOT / "protocols" / "echo_protocols",
    "echo_p2p": ROOT / "echo_p2p",
    "echo_bootstrap": ROOT / "bootstrap" / "echo_bootstrap",
    "echo_node": ROOT / "node" / "echo_node",
}

HOMES = {
    "libp2p": {"echo_p2p.net.gossip"},
    "hivemind": {"echo_p2p.net.hive", "echo_p2p.rl.average"},
    "transformers": {
        "echo_p2p.chain.torch_model",
        "echo_p2p.chain.torch_cache",
        "echo_p2p.models",
        "echo_p2p.models.warm_start",
    },
    "huggingface_hub": {"echo_p2p.models.hub"},
    "numba": {"echo_p2p.kernels"},
    "mlx": {f"echo_p2p.chain.mlx_{part}" for part in ("cache", "model", "stage", "weights")},
    "mlx_lm": {"echo_p2p.chain.mlx_model"},
    "vllm": {"echo_p2p.chain.vllm_core", "echo_p2p.chain.vllm_sampler"},
    "verl": {
        "echo_p2p.rl.verl_trainer",
        "echo_p2p.rl.verl_model",
        "echo_p2p.rl.verl_advantage",
        "echo_p2p.rl.verl_worker",
        "echo_p2p.rl.verl_engines",
        "echo_p2p.rl.verl_cpu",
        "echo_p2p.rl.verl_ray",
    },
    "ray": {"echo_p2p.rl.verl_ray"},
    "reasoning_gym": {"echo_p2p.rl.tasks"},
    "starlette": {"echo_node.api"},
    "hypercorn": {"echo_node.api"},
}
PROTOCOLS_MAY_IMPORT = {"echo_protocols", "msgspec", "cryptography"}
NO_SIDE_EFFECTS = {"socket", "time", "asyncio", "threading", "subprocess", "os", "random", "secrets"}

RANKS = {"errors": 0, "config": 0, "identity": 0, "protobuf": 0, "kernels": 0, "tensors": 0, "net": 1, "records": 2,
         "swarm": 2, "presence": 2, "spread": 2, "models": 2, "weights": 3, "chain": 3, "rl": 3}  # fmt: skip
"""Rooms of the library, from the ground up; a room imports only from lower ones, and the top three not each other."""

COMPOSERS = {"echo_p2p.models.warm_start"}
"""Scripts that put rooms together; nobody imports them."""

HEAVY = ("torch", "hivemind", "libp2p", "verl", "transformers", "numpy", "numba", "reasoning_gym", "starlette")


def name_of(package: str, path: Path) -> str:
    inside = path.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join((package, *inside)).removesuffix(".__init__")


@cache
def modules() -> dict[str, ast.Module]:
    return {
        name_of(package, path): ast.parse(path.read_text(encoding="utf-8"))
        for package, folder in PACKAGES.items()
        for path in sorted(folder.rglob("*.py"))
    }


def imports(module: str) -> Iterator[str]:
    """What a module imports anywhere in it: full names, those of modules where that is what is imported."""
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules() else node.module


def top(name: str) -> str:
    return name.partition(".")[0]


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def violations(rule) -> list[str]:
    return [f"{module} imports {name}" for module in modules() for name in imports(module) if rule(module, name)]


def test_each_vendor_is_imported_by_its_home_alone():
    assert not violations(lambda module, name: top(name) in HOMES and module not in HOMES[top(name)])


def test_protocols_need_nothing_but_values_and_signatures():
    assert not violations(
        lambda module, name: (
            top(module) == "echo_protocols"
            and (top(name) not in PROTOCOLS_MAY_IMPORT | sys.stdlib_module_names or top(name) in NO_SIDE_EFFECTS)
        )
    )


def test_packages_import_downwards_only():
    below = {
        "echo_protocols": set(),
        "echo_p2p": {"echo_protocols"},
        "echo_bootstrap": {"echo_protocols", "echo_p2p"},
        "echo_node": {"echo_protocols", "echo_p2p", "echo_bootstrap"},
    }
    assert not violations(
        lambda module, name: top(name) in PACKAGES and top(name) not in {top(module), *below[top(module)]}
    )


def test_rooms_of_the_library_are_known():
    assert {room(name) for name in modules() if top(name) == "echo_p2p"} - {""} == set(RANKS)


def test_rooms_of_the_library_import_downwards_only():
    def wrong(module: str, name: str) -> bool:
        if top(module) != "echo_p2p" or top(name) != "echo_p2p" or not room(module) or not room(name):
            return False
        if room(module) == room(name) or module in COMPOSERS:
            return name in COMPOSERS
        # rooms of one rank on the ground and in the middle may know each other; weights, chain and rl may not
        allowed = RANKS[room(name)] <= RANKS[room(module)] if RANKS[room(module)] < 3 else RANKS[room(name)] < 3
        return not allowed

    assert not violations(wrong)


def test_nobody_imports_the_tests():
    assert not violations(lambda _, name: top(name) == "tests")
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert "tests" not in {top(name) for name in names}, path.name


def test_only_the_command_line_prints():
    printing = {
        module
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing <= {"echo_node.cli"}


def test_nothing_is_imported_in_a_circle():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module in done:
            return
        for name in top_level_imports(module):
            visit(name, (*path, module))
        done.add(module)

    for module in modules():
        visit(module, ())


def top_level_imports(module: str) -> set[str]:
    """Our own modules that importing this one imports."""
    found = set()
    for node in modules()[module].body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found & set(modules()) - {module}


def test_every_module_says_what_it_is():
    assert [module for module, tree in modules().items() if not ast.get_docstring(tree)] == []


def loaded_by(*imported: str) -> set[str]:
    """Top-level modules in a fresh interpreter after importing these."""
    names = "sorted({name.partition('.')[0] for name in sys.modules})"
    code = f"import {', '.join(imported)}, sys; sys.stdout.write(' '.join({names}))"
    paths = ", ".join(repr(str(folder.parent)) for folder in PACKAGES.values())
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{paths}]; {code}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return set(found.stdout.split())


def test_the_command_line_answers_at_once():
    assert not loaded_by("echo_node.cli") & set(HEAVY)


def test_importing_the_protocols_loads_nothing_heavy():
    loaded = loaded_by(*(module for module in modules() if top(module) == "echo_protocols"))
    assert not loaded & {*HEAVY, "trio", "asyncio", "echo_p2p"}


@pytest.mark.parametrize(
    "module", ["echo_p2p.config", "echo_p2p.identity", "echo_p2p.net.memory", "echo_p2p.weights.codec"]
)
def test_light_parts_of_the_library_stay_light(module):
    assert not loaded_by(module) & {"torch", "hivemind", "libp2p", "verl", "transformers"}
