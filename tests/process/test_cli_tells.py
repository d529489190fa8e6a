"""`sapwood models` and `sapwood env`: what they tell, what they hide, and that they never fail."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import sapwood
from sapwood.srt import cli
from sapwood.srt.cli import models, probes
from sapwood.srt.loader import packaged
from sapwood.srt.models import registry


def test_models_tells_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path / "none"))
    found = models.collect()
    assert [p["name"] for p in found["packaged"]] == list(packaged.PACKAGED)
    assert not any(p["cached"] for p in found["packaged"])
    assert [p["default"] for p in found["packaged"]].count(True) == 1
    assert found["cached"] == []
    assert found["architectures"] == registry.supported()
    assert {"q4_0", "q8_0", "f16"} <= set(found["gguf_types"])
    assert "llama3" in found["rope_kinds"]

    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.gguf").write_bytes(bytes(1500))
    (tmp_path / "models" / "a.gguf.checked").write_bytes(b"{}")
    (tmp_path / "models" / ".fetch-1").mkdir()
    (tmp_path / "models" / ".fetch-1" / "part").write_bytes(b"x")
    assert models.collect()["cached"] == [{"path": "models/a.gguf", "bytes": 1500}]

    assert cli.main(["models"]) == 0
    said = capsys.readouterr().out
    for word in (packaged.DEFAULT.name, "not fetched", "LlamaForCausalLM", "models/a.gguf", "1.5 kB"):
        assert word in said
    assert cli.main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == models.collect()


def test_env_tells_versions_and_hides_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path / "kept"))
    monkeypatch.setenv("SAPWOOD_API_KEY", "very-secret")
    monkeypatch.setenv("SAPWOOD_PORT", "1234")
    monkeypatch.setenv("OTHER_THING", "unseen")
    assert cli.main(["env"]) == 0
    said = capsys.readouterr().out
    assert "very-secret" not in said
    assert "unseen" not in said
    assert str(tmp_path) not in said
    lines = [line.split() for line in said.splitlines()]
    assert ["sapwood", sapwood.__version__] in lines
    assert ["SAPWOOD_PORT", "1234"] in lines
    assert ["SAPWOOD_API_KEY", "(set)"] in lines
    assert ["cache", "folder", "~/kept"] in lines
    assert cli.main(["env", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["torch"]
    assert told["kernels"]["built"] == "yes"
    assert told["kernels"]["isa"] in told["kernels"]["isa available"].split(", ")
    assert told["platform"]["cores"].endswith(f"of {os.cpu_count()}")


def test_env_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_arguments: object, **_options: object) -> str:
        raise OSError("nothing there")

    monkeypatch.setattr(Path, "read_text", gone)
    monkeypatch.setattr("importlib.metadata.version", gone)
    monkeypatch.setattr("sapwood.kernels.native.available", gone)
    found = probes.collect({})
    assert found["platform"]["cpu"] == "unknown (OSError)"
    assert found["platform"]["memory"] == "unknown (OSError)"
    assert found["versions"].keys() == {"sapwood", "python"}
    assert found["kernels"] == {"built": "no: nothing there"}
    assert found["nvidia"] == {}


def test_a_gpu_is_told_by_its_own_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = Path.read_text

    def with_driver(path: Path, *arguments: str) -> str:
        if str(path) == "/proc/driver/nvidia/version":
            return "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1\nGCC version: 12\n"
        return read(path, *arguments)

    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 9.0'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(Path, "read_text", with_driver)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert probes.nvidia() == {
        "driver": "NVIDIA UNIX x86_64 Kernel Module 580.1",
        "device 0": "NVIDIA H100, 81559 MiB, 9.0",
    }
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert probes.nvidia()["devices"] == "unknown (CalledProcessError)"

    def hangs(*_arguments: object, **_options: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 5)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert probes.nvidia()["devices"] == "unknown (TimeoutExpired)"
