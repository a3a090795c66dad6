"""What Ray's workers write to their files is shown line by line, with who has written it."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.serve.replicas.logs import WorkerLogs, shown_logs


def test_lines_are_shown_once_and_whole(tmp_path: Path) -> None:
    shown: list[str] = []
    logs = WorkerLogs(tmp_path, shown.append)
    logs.look()
    (tmp_path / "gcs_server.out").write_text("of Ray's own\n")
    file = tmp_path / "worker-ab12-01000000-77.err"
    file.write_bytes(b":job_id:01000000\nfirst\n:actor_name:ServeReplica:forerun:Forerun\nsecond \xff\nthi")
    logs.look()
    assert shown == ["(worker pid=77) first", "(ServeReplica:forerun:Forerun pid=77) second \ufffd"]
    with file.open("a") as more:
        more.write("rd\n")
    (tmp_path / "worker-cd34-01000000-78.out").write_text("of another\n")
    logs.look()
    logs.look()
    assert shown[2:] == ["(ServeReplica:forerun:Forerun pid=77) third", "(worker pid=78) of another"]
    file.rename(tmp_path / "worker-ab12-01000000-77.err.1")
    logs.look()
    file.write_text("anew\n")
    logs.look()
    assert shown[4:] == ["(ServeReplica:forerun:Forerun pid=77) anew"]


def test_what_is_written_last_is_shown_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with shown_logs(tmp_path):
        (tmp_path / "worker-ab12-01000000-77.err").write_text("the last words\n")
    assert capsys.readouterr().err == "(worker pid=77) the last words\n"
