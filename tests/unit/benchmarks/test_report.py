"""What reports say of the machine."""

from __future__ import annotations

import platform
from pathlib import Path

from pdserve.base.host_facts import cpu_model

CPU = "processor\t: {index}\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: {index}\n\n"


def test_a_processor_is_told_by_name_family_and_model(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(CPU.format(index=0) + CPU.format(index=1))
    assert cpu_model(info) == "AMD EPYC (family 25, model 17)"
    info.write_text("model name\t: ARM\n")
    assert cpu_model(info) == "ARM"
    assert cpu_model(tmp_path / "none") == (platform.processor() or platform.machine())
