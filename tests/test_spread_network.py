"""A release over real nodes behind a slow link, in network namespaces."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench" / "weights_spread_network.py"


def reason_to_skip() -> str | None:
    """Why there can be no namespaces here, if so."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{missing[0]} is not installed (iproute2)"
    trial = "echo-trial"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", trial], capture_output=True, check=False)
    return None if made.returncode == 0 else "this machine lets nobody make network namespaces"


@pytest.mark.slow
@pytest.mark.network
def test_six_real_nodes_share_one_upload_of_a_slow_trainer(tmp_path: Path) -> None:
    if reason := reason_to_skip():
        pytest.skip(reason)
    answer = tmp_path / "figures.json"
    subprocess.run([sys.executable, BENCH, "--peers", "6", "--json", answer], check=True, timeout=300)
    figures = json.loads(answer.read_text())
    assert figures["network_spread_over_ideal"] < 2
    assert figures["network_upload_copies"] < 2
