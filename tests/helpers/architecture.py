"""The written rules of the code base, checked on the syntax tree of any source tree.

Every rule is a function `rule(root) -> list[str]`: one line a violation, empty when the tree keeps the rule.
They take the root so that the tests can plant each violation in a temporary tree.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "mcore_qwen3"
RELATIVE = "(relative)"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_FILE_BYTES = 200_000

# Package -> the packages of this project it may import. `cli` joins them all.
OURS = {
    "errors": set(),
    "config": {"errors"},
    "arch": {"errors", "config"},
    "planner": {"errors", "config", "arch"},
    "launch": {"errors", "config", "arch"},
    "converters": {"errors", "config", "arch"},
    "runtime": {"errors", "config", "arch"},
    "data": {"errors", "config", "arch"},
    "model": {"errors", "config", "arch", "runtime"},
    "train": {"errors", "config", "arch", "runtime", "model", "data"},
    "cli": {"errors", "config", "arch", "planner", "launch", "converters", "runtime", "data", "model", "train", "cli"},
    "__main__": {"cli"},
    "__init__": set(),
}

# Package -> the libraries it may import beside the standard library.
LIBRARIES = {
    "errors": set(),
    "config": {"yaml"},
    "arch": set(),
    "planner": set(),
    "launch": set(),
    "converters": {"torch", "safetensors", "numpy"},
    "runtime": {"torch", "numpy", "megatron", "transformer_engine", "apex"},
    "data": {
        "torch",
        "numpy",
        "tokenizers",
        "transformers",
        "datasets",
        "pyarrow",
        "filelock",
        "jinja2",
        "safetensors",
    },
    "model": {"torch", "megatron", "transformer_engine", "apex"},
    "train": {"torch", "numpy", "megatron", "matplotlib", "psutil", "rich", "yaml"},
    "cli": {
        "torch",
        "numpy",
        "megatron",
        "rich",
        "yaml",
        "transformers",
        "tokenizers",
        "matplotlib",
        "huggingface_hub",
    },
    "__main__": set(),
    "__init__": set(),
}
# File of a package -> libraries that it alone may import on top.
FILE_LIBRARIES = {"data/indexed.py": {"megatron"}, "planner/fit.py": {"numpy"}, "cli/doctor_checks.py": {"packaging"}}
ACCELERATORS = {"transformer_engine", "apex", "flash_attn"}

# Packages that cannot hand a device to torch (they may not import it), and the one whose job it is.
NO_DEVICE_RULE = {"config", "arch", "planner", "launch", "runtime", "errors"}
DEVICE_NAME = re.compile(r"(cuda|cpu|nccl|gloo)(:\d+)?")
DEVICE_KEYWORDS = {"device", "map_location", "backend", "device_type"}
DEVICE_MODULES = {"cuda", "cpu", "mps", "xpu"}

# Spelled in pieces so that this file keeps the rule it checks.
MACHINE_PATHS = ["/" + "root/", "/" + "home/", "/" + "Users/", "/work" + "/shared", "/work" + "/main", "/" + "opt/"]
REGISTRY_HOSTS = ["pypi" + ".org", "python" + "hosted.org", "npm" + "js.", "download." + "pytorch", "pypi." + "nvidia"]


def check_imports_between_packages(root: Path) -> list[str]:
    """Imports between our packages follow the layers of `OURS`."""
    found = []
    for path, tree in package_trees(root):
        package = package_of(root, path)
        for line, module in imported_modules(tree):
            parts = module.split(".")
            if parts[0] != PACKAGE:
                continue
            target = parts[1] if len(parts) > 1 else "__init__"
            if target == RELATIVE:
                found.append(f"{where(root, path, line)}: a relative import; imports are written in full")
            elif target not in {package, "__init__"} and target not in OURS.get(package, set()):
                found.append(f"{where(root, path, line)}: {package} must not import {PACKAGE}.{target}")
    return found


def check_libraries(root: Path) -> list[str]:
    """Each package imports only the libraries of `LIBRARIES`."""
    found = []
    for path, tree in package_trees(root):
        package = package_of(root, path)
        if package not in LIBRARIES:
            found.append(f"{where(root, path, 1)}: {package} is no package of the design")
            continue
        file = path.relative_to(root / PACKAGE).as_posix()
        allowed = LIBRARIES[package] | FILE_LIBRARIES.get(file, set()) | {PACKAGE}
        for line, module in imported_modules(tree):
            top = module.split(".")[0]
            if top not in sys.stdlib_module_names and top not in allowed:
                found.append(f"{where(root, path, line)}: {package} must not import {top}")
    return found


def check_accelerators_are_lazy(root: Path) -> list[str]:
    """transformer-engine, apex and flash-attention are looked for at run time, never imported with a module."""
    found = []
    for path, tree in package_trees(root):
        for line, module in imported_modules(tree, inside_functions=False):
            if module.split(".")[0] in ACCELERATORS:
                found.append(f"{where(root, path, line)}: {module} is imported at module level")
    return found


def check_device_names(root: Path) -> list[str]:
    """Only runtime/ gives a device or backend name to torch, or touches torch.cuda."""
    found = []
    for path, tree in package_trees(root):
        if package_of(root, path) in NO_DEVICE_RULE:
            continue
        for node in ast.walk(tree):
            problem = device_problem(node)
            if problem:
                found.append(f"{where(root, path, getattr(node, 'lineno', 1))}: {problem}; ask runtime/ for it")
    return found


def device_problem(node: ast.AST) -> str:
    """What one node hands to torch that only runtime/ may; "" when nothing."""
    if isinstance(node, ast.Call):
        handed = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg in DEVICE_KEYWORDS)]
        for value in handed:
            if isinstance(value, ast.Constant) and is_device_name(value.value):
                return f"the name {value.value!r} is handed to a call"
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            return "a call of .cuda()"
    if isinstance(node, ast.Attribute) and is_torch(node.value) and node.attr in DEVICE_MODULES:
        return f"a use of torch.{node.attr}"
    if isinstance(node, ast.Import) and any(alias.name.startswith("torch.cuda") for alias in node.names):
        return "an import of torch.cuda"
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        names = {f"{node.module}.{alias.name}" for alias in node.names} | {f"{node.module}."}
        if any(name.startswith("torch.cuda") for name in names):
            return "an import of torch.cuda"
    return ""


def is_device_name(value: object) -> bool:
    """Whether a constant names a device or backend."""
    return isinstance(value, str) and DEVICE_NAME.fullmatch(value) is not None


def is_torch(node: ast.expr) -> bool:
    """Whether an expression is `torch` or `torch.backends`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "backends" and is_torch(node.value)
    return isinstance(node, ast.Name) and node.id == "torch"


def check_sizes(root: Path) -> list[str]:
    """Files and functions stay short enough to read."""
    found = []
    for path in python_files(root):
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines >= MAX_FILE_LINES:
            found.append(f"{where(root, path, 1)}: {lines} lines, under {MAX_FILE_LINES} is the rule")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length >= MAX_FUNCTION_LINES:
                    found.append(f"{where(root, path, node.lineno)}: {node.name} has {length} lines")
    return found


def check_docstrings(root: Path) -> list[str]:
    """Public modules, functions and classes of the package say what they are for."""
    found = []
    for path, tree in package_trees(root):
        if not ast.get_docstring(tree) and tree.body:
            found.append(f"{where(root, path, 1)}: the module has no docstring")
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                found.append(f"{where(root, path, node.lineno)}: {node.name} has no docstring")
    return found


def check_fields_are_read(root: Path) -> list[str]:
    """Every setting of every command is read somewhere: a flag that nothing reads is a lie.

    A read is an attribute that is loaded, not called, and not looked up on an imported module (`torch.load`).
    It counts outside config/, and inside config/ in a function with a result that is used outside. Flags that the table
    NEVER_USED of config/effects.py names, with its reason, are said to do nothing when they are set.
    """
    fields = setting_fields(root)
    read: set[str] = set()
    outside: set[str] = set()
    for path, tree in package_trees(root):
        if package_of(root, path) != "config":
            read |= attributes_read(tree, imported_names(tree))
            outside |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            outside |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    helpers = config_helpers(root)
    waiting = [name for name in helpers if name in outside]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        read |= attributes_read(helpers[name], set())
        waiting += [node.id for node in ast.walk(helpers[name]) if isinstance(node, ast.Name) and node.id in helpers]
    read |= never_used(root)
    return [f"{PACKAGE}/config: nothing reads {section}.{name}" for section, name in fields if name not in read]


def never_used(root: Path) -> set[str]:
    """Keys of the NEVER_USED table of config/effects.py, if there is one."""
    for path, tree in package_trees(root):
        if package_of(root, path) == "config" and path.name == "effects.py":
            for node in tree.body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NEVER_USED":
                    return set(ast.literal_eval(node.value))
    return set()


def setting_fields(root: Path) -> list[tuple[str, str]]:
    """(section, field) of every setting, each once, read off the classes named ...Config and their section classes."""
    classes = {
        node.name: node
        for path, tree in package_trees(root)
        if package_of(root, path) == "config"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    if "RunConfig" not in classes:
        return [("config", "RunConfig")]
    fields = [
        (section, name)
        for command, node in classes.items()
        if command.endswith("Config")
        for section, kind in annotated(node)
        if kind in classes
        for name, _ in annotated(classes[kind])
    ]
    return list(dict.fromkeys(fields))


def annotated(node: ast.ClassDef) -> list[tuple[str, str]]:
    """(name, annotation) of the fields of a dataclass."""
    return [
        (item.target.id, ast.unparse(item.annotation))
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def config_helpers(root: Path) -> dict[str, ast.FunctionDef]:
    """Functions of config/ that work out a value; one that returns None only checks."""
    return {
        node.name: node
        for path, tree in package_trees(root)
        if package_of(root, path) == "config"
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) != "None"
    }


def attributes_read(tree: ast.AST, modules: set[str]) -> set[str]:
    """Names of attributes that are loaded as values, not called, and not taken from an imported module."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and id(node) not in called
        and not (isinstance(node.value, ast.Name) and node.value.id in modules)
    }


def imported_names(tree: ast.AST) -> set[str]:
    """Names that `import x` and `import x as y` bind in a file."""
    return {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }


def check_tracked_text(root: Path) -> list[str]:
    """No tracked file names this or any machine's folders or a registry's host."""
    found = []
    for path in tracked_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for word in [*MACHINE_PATHS, *REGISTRY_HOSTS]:
                if re.search(rf"(?<![\w.$}}]){re.escape(word)}", line):
                    found.append(f"{where(root, path, number)}: names {word}")
    return found


def check_tracked_sizes(root: Path) -> list[str]:
    """No tracked file is big: data and weights are fetched or made."""
    return [
        f"{where(root, path, 1)}: {path.stat().st_size} bytes, at most {MAX_FILE_BYTES} is the rule"
        for path in tracked_files(root)
        if path.stat().st_size > MAX_FILE_BYTES
    ]


RULES = [
    check_imports_between_packages,
    check_libraries,
    check_accelerators_are_lazy,
    check_device_names,
    check_sizes,
    check_docstrings,
    check_fields_are_read,
    check_tracked_text,
    check_tracked_sizes,
]


def imported_modules(tree: ast.Module, *, inside_functions: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import; `from mcore_qwen3 import arch` counts as mcore_qwen3.arch."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not inside_functions:
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, f"{PACKAGE}.{RELATIVE}"
            elif node.module == PACKAGE:
                names = [alias.name for alias in node.names if not alias.name.startswith("__")]
                yield from ((node.lineno, f"{PACKAGE}.{name}") for name in names)
            else:
                yield node.lineno, node.module or ""


def package_of(root: Path, path: Path) -> str:
    """The layer a file belongs to: its folder below the package, or its own name at the top."""
    return path.relative_to(root / PACKAGE).with_suffix("").parts[0]


def package_trees(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Every file of the package with its syntax tree."""
    for path in sorted((root / PACKAGE).rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def python_files(root: Path) -> list[Path]:
    """Every Python file that belongs to the project: package, tests, scripts, examples."""
    return [path for path in tracked_files(root) if path.suffix == ".py"]


def tracked_files(root: Path) -> list[Path]:
    """Files that git tracks or would take up; every file where there is no git."""
    if (root / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
        paths = [root / name for name in listed.split("\0") if name]
    else:
        paths = list(root.rglob("*"))
    return sorted(path for path in paths if path.is_file())


def where(root: Path, path: Path, line: int) -> str:
    """A place as `file:line`, from the root."""
    return f"{path.relative_to(root)}:{line}"
