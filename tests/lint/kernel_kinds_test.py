"""bench/kernel_kinds.py adds up the time of a step by kind of kernel."""

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def event(name, begin, length, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length}


def run(events, *options, compressed=False):
    text = json.dumps({"traceEvents": events}).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("trace.json.gz" if compressed else "trace.json")
        path.write_bytes(gzip.compress(text) if compressed else text)
        return subprocess.run(
            [sys.executable, ROOT / "bench/kernel_kinds.py", *options, path],
            capture_output=True,
            text=True,
        )


# In microseconds. The RoPE and the copies run in parallel with matmuls in part.
EVENTS = [
    event("cudaLaunchKernel", 0, 900, "cuda_runtime"),
    {"ph": "f", "cat": "kernel", "name": "ac2g", "ts": 0},
    event("nvjet_sm90_tst_256x128_64x4", 1000, 4000),
    event("void flatshard::nn::matmul_kernel<float>(Tiles)", 5000, 1000),
    event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 6000, 2000),
    event("triton_poi_fused__scaled_dot_product_cudnn_attention_0", 8000, 500),
    event("void flatshard::rope_kernel<float>(Rows)", 4500, 1000),
    event("Memcpy DtoD (Device -> Device)", 8000, 1000, "gpu_memcpy"),
    event("Memset (Device)", 9000, 500, "gpu_memset"),
    event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 10500, 500),
]
TABLE = """
| attention | 1 | 2.000 | 2.000 | 20.0% |
| matmuls | 1 | 4.000 | 4.000 | 40.0% |
| matmuls of Flatshard | 1 | 1.000 | 1.000 | 10.0% |
| other kernels | 2 | 1.500 | 0.500 | 5.0% |
| communication | 1 | 0.500 | 0.500 | 5.0% |
| copies and fills | 2 | 1.500 | 1.000 | 10.0% |
| idle |  |  | 1.000 | 10.0% |
| the step | 8 |  | 10.000 | 100.0% |
"""
for compressed in (False, True):
    done = run(EVENTS, compressed=compressed)
    assert done.returncode == 0 and TABLE in done.stdout, done
    names = done.stdout.partition("other kernels, ms and kernels:\n")[2].splitlines()
    assert names[0] == "    1.000      1  void flatshard::rope_kernel<float>(Rows)", (
        done
    )
    assert names[1].split()[:2] == ["0.500", "1"] and len(names) == 2, done

done = run(EVENTS, "--steps=2")
assert "| matmuls | 0.5 | 2.000 | 2.000 | 40.0% |" in done.stdout, done

done = run(EVENTS[:2])
assert done.returncode == 1 and "trace a step on a GPU" in done.stderr, done
