"""A model folder is whole or absent, whatever happens on the way to it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantize.errors import QuantizeError
from quantize.hashes import RECORD_FILE
from quantize.publish import Workplace

ROOT = Path(__file__).parents[1]
# Takes the place given as argument, writes half a model, and ends like a killed process.
KILLED = """
import os, sys
from pathlib import Path
from quantize.publish import Workplace
workplace = Workplace(Path(sys.argv[1]), replace=True).__enter__()
(workplace.folder / "half.onnx").write_text("half")
os._exit(9)
"""
REFUSED = """
import sys
from pathlib import Path
from quantize.errors import QuantizeError
from quantize.publish import Workplace
try:
    Workplace(Path(sys.argv[1]), replace=True).__enter__()
except QuantizeError as error:
    sys.exit(str(error))
"""


class PowerCut(BaseException):
    """Not an Exception: KeyboardInterrupt and SystemExit come this way too."""


def run(code: str, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(output)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def publish(output: Path, replace: bool = False, **files: str) -> None:
    with Workplace(output, replace=replace) as workplace:
        for name, text in ({RECORD_FILE: "{}"} | files).items():
            (workplace.folder / name).write_text(text)
        workplace.publish()


def content(folder: Path) -> dict[str, str]:
    """Of a folder, but for the record that makes it one of ours."""
    files = {file.name: file.read_text() for file in folder.iterdir()}
    files.pop(RECORD_FILE, None)
    return files


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Not there yet, and neither is its parent."""
    return tmp_path / "models" / "mine"


def left_beside(output: Path) -> set[str]:
    return {entry.name for entry in output.parent.iterdir()} - {".cache"}


def test_nothing_is_at_output_until_publish(output: Path) -> None:
    with Workplace(output) as workplace:
        (workplace.folder / "model").write_text("new")
        assert not output.exists()
        workplace.publish()
        assert content(output) == {"model": "new"}


def test_published_folder_stays_and_the_scratch_goes(output: Path) -> None:
    publish(output, model="new", config="{}")
    assert content(output) == {"model": "new", "config": "{}"}
    assert left_beside(output) == {"mine"}


def test_run_that_does_not_publish_leaves_nothing(output: Path) -> None:
    with Workplace(output) as workplace:
        (workplace.folder / "model").write_text("new")
    assert left_beside(output) == set()


@pytest.mark.parametrize("error", [QuantizeError, KeyboardInterrupt, PowerCut])
def test_failure_leaves_no_output_and_no_scratch(error: type[BaseException], output: Path) -> None:
    with pytest.raises(error), Workplace(output) as workplace:
        (workplace.folder / "model").write_text("half")
        raise error
    assert left_beside(output) == set()


def test_failure_leaves_the_folder_that_was_to_be_replaced(output: Path) -> None:
    publish(output, model="old")
    with pytest.raises(PowerCut), Workplace(output, replace=True) as workplace:
        (workplace.folder / "model").write_text("half")
        raise PowerCut
    assert content(output) == {"model": "old"}


def test_existing_output_is_refused_and_untouched(output: Path) -> None:
    publish(output, model="old")
    with pytest.raises(QuantizeError, match=r"exists already; --force"):
        publish(output, model="new")
    assert content(output) == {"model": "old"}


def test_existing_output_is_replaced_whole_if_asked(output: Path) -> None:
    publish(output, model="old", leftover="old")
    publish(output, replace=True, model="new", config="{}")
    assert content(output) == {"model": "new", "config": "{}"}
    assert left_beside(output) == {"mine"}


def test_somebody_elses_folder_is_never_replaced(output: Path) -> None:
    output.mkdir(parents=True)
    (output / "model.safetensors").write_text("the only copy")
    with pytest.raises(QuantizeError, match="holds something else"):
        publish(output, replace=True, model="new")
    assert content(output) == {"model.safetensors": "the only copy"}


def test_old_folder_is_back_if_the_new_one_cannot_take_its_place(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(output, model="old")
    rename = os.replace

    def fail_for_new(source: Path, target: Path) -> None:
        if Path(source).name == "folder":
            raise OSError("cannot rename")
        rename(source, target)

    monkeypatch.setattr(os, "replace", fail_for_new)
    with pytest.raises(OSError, match="cannot rename"):
        publish(output, replace=True, model="new")
    assert content(output) == {"model": "old"}


def test_replace_does_not_need_an_output(output: Path) -> None:
    publish(output, replace=True, model="new")
    assert content(output) == {"model": "new"}


def test_leftovers_of_a_killed_run_are_removed(output: Path) -> None:
    assert run(KILLED, output).returncode == 9
    assert list(output.parent.rglob("half.onnx"))  # it did leave something
    publish(output, model="new")
    assert content(output) == {"model": "new"}
    assert left_beside(output) == {"mine"}


def test_killed_run_leaves_the_published_folder(output: Path) -> None:
    publish(output, model="old")
    assert run(KILLED, output).returncode == 9
    assert content(output) == {"model": "old"}


def test_second_process_is_refused_while_one_is_at_work(output: Path) -> None:
    with Workplace(output):
        second = run(REFUSED, output)
    assert (second.returncode, second.stderr.strip()) == (1, f"another run is building {output}")


def test_refused_run_does_not_disturb_the_one_at_work(output: Path) -> None:
    with Workplace(output) as workplace:
        (workplace.folder / "model").write_text("new")
        with pytest.raises(QuantizeError, match="another run"), Workplace(output):
            pass
        workplace.publish()
    assert content(output) == {"model": "new"}


def test_other_output_can_be_built_at_the_same_time(output: Path) -> None:
    with Workplace(output) as workplace:
        publish(output.with_name("other"), model="other")
        (workplace.folder / "model").write_text("new")
        workplace.publish()
    assert left_beside(output) == {"mine", "other"}


@pytest.mark.parametrize("is_published", [True, False])
def test_next_run_can_start_when_one_has_ended(output: Path, is_published: bool) -> None:
    with Workplace(output) as workplace:
        if is_published:
            workplace.publish()
    publish(output, replace=is_published, model="new")
    assert content(output) == {"model": "new"}


def test_cache_outlives_the_run(output: Path) -> None:
    with Workplace(output) as workplace:
        (workplace.cache / "download").write_text("kept")
    with Workplace(output) as workplace:
        assert (workplace.cache / "download").read_text() == "kept"


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_published_files_can_be_read_by_others(mode: int, output: Path) -> None:
    with Workplace(output) as workplace:
        file = workplace.folder / "model.onnx.data"
        file.touch(mode)
        file.chmod(mode)
        workplace.publish()
    assert (output / "model.onnx.data").stat().st_mode & 0o777 == 0o644


def test_published_folder_can_be_entered_by_others_whatever_the_umask(output: Path) -> None:
    old = os.umask(0o077)
    try:
        publish(output, model="new")
    finally:
        os.umask(old)
    assert output.stat().st_mode & 0o055 == 0o055


def test_published_subfolder_can_still_be_entered(output: Path) -> None:
    with Workplace(output) as workplace:
        (workplace.folder / "additional_chat_templates").mkdir()
        workplace.publish()
    assert (output / "additional_chat_templates").stat().st_mode & 0o111 == 0o111


def test_parent_that_cannot_hold_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(QuantizeError, match="cannot write to"), Workplace(tmp_path / "file" / "x"):
        pass
