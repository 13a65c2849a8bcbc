"""Test modules of a checkout of PyTorch, changed for CPUs while they are imported."""

import ast
import importlib.util
import os
import re
import sys

_BACKENDS = dict.fromkeys(("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"), "gloo")
# The names of accelerators, as a fork of PyTorch may name another one.
_DEVICE = re.compile(r"(cuda|npu)(:\d*)?")


class _OnCpu(ast.NodeTransformer):
    """Names the CPU where the source names a GPU, and Gloo where it names NCCL."""

    def __init__(self):
        self._function = ""

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            if _DEVICE.fullmatch(node.value):
                node.value = "cpu"
            node.value = _BACKENDS.get(node.value, node.value)
        return node

    def visit_JoinedStr(self, node):
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and _DEVICE.fullmatch(first.value):
            return ast.copy_location(ast.Constant("cpu"), node)
        return node

    def visit_Return(self, node):
        # The device of a rank, as its number.
        if self._function == "device" and ast.unparse(node) == "return self.rank":
            node.value = ast.copy_location(ast.Constant("cpu"), node.value)
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node):
        around, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = around
        return node

    def visit_Call(self, node):
        # DistributedDataParallel accepts them only for GPUs.
        node.keywords = [k for k in node.keywords if k.arg != "device_ids"]
        names_gpu = (
            node.args
            and isinstance(node.args[0], ast.Constant)
            and node.args[0].value in ("cuda", "npu")
        )
        if names_gpu and ast.unparse(node.func) == "torch.device":
            del node.args[1:]
        self.generic_visit(node)
        return node


def import_file(path):
    """Returns the module of a test file."""
    name = os.path.splitext(os.path.basename(path))[0]
    with open(path) as f:
        tree = ast.parse(f.read(), path)
    tree = ast.fix_missing_locations(_OnCpu().visit(tree))
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader(name, loader=None, origin=path)
    )
    module.__file__ = path
    sys.modules[name] = module
    exec(compile(tree, path, "exec"), module.__dict__)
    return module


def find_files(checkout):
    """Returns the test files of FSDP2 in a checkout, sorted."""
    found = []
    for folder, begin in (
        ("test/distributed/_composable/fsdp", "test_fully_shard_"),
        ("test/distributed/_composable/test_composability", "test_"),
        ("test/distributed/fsdp2", "test_fully_shard_"),
    ):
        folder = os.path.join(checkout, folder)
        if os.path.isdir(folder):
            found += [
                os.path.join(folder, file)
                for file in sorted(os.listdir(folder))
                if file.startswith(begin) and file.endswith(".py")
            ]
    return found
