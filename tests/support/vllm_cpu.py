"""Sets the environment variables that vLLM needs on a CPU. Import this before vLLM; variables already set stay."""

import os

ON_CPU = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes minutes, while the tests take seconds
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

for _name, _value in ON_CPU.items():
    os.environ.setdefault(_name, _value)
