"""The AppWorld servers of a configuration file are shared out over the processes of a distributed run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gvpo_trl.cli.run import own_urls
from gvpo_trl.faults import SetupError

ROOT = Path(__file__).resolve().parents[2]
URLS = ["http://127.0.0.1:8001", "http://127.0.0.1:8002", "http://127.0.0.1:8003"]
SCRIPT = """
import json, sys
from pathlib import Path

from gvpo_trl import GVPOConfig
from gvpo_trl.cli.run import own_urls

folder, *urls = sys.argv[1:]
args = GVPOConfig(output_dir=folder, use_cpu=True, bf16=False, report_to="none")
Path(folder, f"{args.process_index}.json").write_text(json.dumps(own_urls(urls, args)))
"""


def test_each_rank_takes_its_own_servers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(script), str(tmp_path), *URLS], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shares = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert shares == [[URLS[0], URLS[2]], [URLS[1]]]


def test_too_few_servers_are_refused_and_none_are_none():
    args = SimpleNamespace(process_index=0, world_size=4)
    with pytest.raises(SetupError, match="3 servers for 4 processes"):
        own_urls(URLS, args)
    assert own_urls(None, args) is None
