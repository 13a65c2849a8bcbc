"""bench/overlap_trace.py counts the copies that meet compute of the other microbatch."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPUTE, EXCHANGE = 7, 20


def trace(*work):
    """Returns a trace of (step, when it was queued, stream, when it ran, how long):
    microseconds."""
    events = []
    for i, (step, queued, stream, begin, length) in enumerate(work):
        is_copy = stream == EXCHANGE
        events += [
            {"cat": "user_annotation", "name": step, "ts": queued, "dur": 5},
            {
                "cat": "cuda_runtime",
                "name": "launch",
                "ts": queued + 2,
                "dur": 1,
                "args": {"correlation": i},
            },
            {
                "cat": "gpu_memcpy" if is_copy else "kernel",
                "name": "Memcpy DtoD" if is_copy else "gemm",
                "ts": begin,
                "dur": length,
                "args": {"correlation": i, "stream": stream},
            },
        ]
    return {"traceEvents": events}


def run(content, *options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps(content))
        return subprocess.run(
            [sys.executable, ROOT / "bench/overlap_trace.py", *options, path],
            capture_output=True,
            text=True,
        )


# The first one overlaps no other microbatch. The second meets the backward of
# microbatch 0, the third only its own compute, the last one nothing.
done = run(
    trace(
        ("F0.dispatch(0)", 0, EXCHANGE, 100, 10),
        ("F1.dispatch(0)", 10, EXCHANGE, 200, 10),
        ("B0.experts(0)", 20, COMPUTE, 205, 40),
        ("B0.dispatch(0)", 30, EXCHANGE, 210, 20),
        ("F1.experts(0)", 40, COMPUTE, 300, 10),
        ("F1.combine(0)", 50, EXCHANGE, 302, 10),
        ("B0.combine(1)", 60, EXCHANGE, 400, 10),
    ),
    "--at-least",
    "0.5",
)
assert done.returncode == 1, done
assert "4 in 0.05 ms, of which 1 (25 %, 0.01 ms) meet its compute" in done.stdout, done
assert "B experts      0.040 ms" in done.stdout, done
assert "F dispatch     0.010 ms" in done.stdout, done
assert "B dispatch     0.020 ms" in done.stdout, done
assert "expected 50% of the copies hidden, got 25%" in done.stderr, done

done = run({"traceEvents": []})
assert done.returncode == 1 and "overlap_expert_parallel" in done.stderr, done

# One rank has all experts: its nodes have times, and no copy is hidden.
alone = trace(("F0.attend(0)", 0, COMPUTE, 100, 10))
done = run(alone)
assert done.returncode == 0 and "F attend       0.010 ms" in done.stdout, done
done = run(alone, "--at-least", "0.5")
assert done.returncode == 1 and "expert_parallel_degree" in done.stderr, done
