"""What torch.compile does not trace."""

import torch


def _set_strategy(function, callees):
    # Not torch.compiler.disable: that imports dynamo, which takes a second, and
    # puts a call around every call.
    frames = torch._C._dynamo.eval_frame
    frames.set_code_exec_strategy(
        function.__code__,
        frames._FrameExecStrategy(frames._FrameAction.SKIP, callees),
    )
    function._torchdynamo_disable = True
    return function


def outside_of_graphs(function):
    """Dynamo leaves the function's frame alone and compiles what it calls."""
    return _set_strategy(function, torch._C._dynamo.eval_frame._FrameAction.DEFAULT)


def never_compiled(function):
    """Dynamo leaves alone the function's frame and those that it calls."""
    return _set_strategy(function, torch._C._dynamo.eval_frame._FrameAction.SKIP)
