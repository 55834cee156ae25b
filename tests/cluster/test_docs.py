"""The commands of docs/launching.md run, and what docs/machines.md says about accelerate config is so.

python -m pytest tests/cluster/test_docs.py
"""

import inspect
import re
from pathlib import Path

import pytest
from accelerate.commands.config import cluster, config
from launching import ROOT, Ended, run

LAUNCHING = (ROOT / "docs" / "launching.md").read_text()
MACHINES = (ROOT / "docs" / "machines.md").read_text()
pytestmark = pytest.mark.timeout(240)


def commands_of(text: str) -> list[str]:
    """Those of the bash blocks that do not begin with `# not tested:`."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)
    return [line for block in blocks if not block.startswith("# not tested: ") for line in block.splitlines()]


@pytest.fixture(scope="module")
def ended(small_csv: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The outcome of each command; those that train do so briefly, on few images."""
    flags = f"--mnist_file_path {small_csv} --epochs 2 --batch_size 20 --width 4 --log_with none"
    folder = tmp_path_factory.mktemp("runs")
    outcomes = {}
    for number, command in enumerate(commands_of(LAUNCHING)):
        if "train_accel.py" in command:
            outcomes[command] = run(f"{command} {flags}", folder / str(number))
        else:
            outcomes[command] = run(command)
    return outcomes


@pytest.mark.slow
def test_every_command_runs_and_all_ways_compute_the_same(ended: dict[str, Ended]) -> None:
    assert all(outcome.status == 0 for outcome in ended.values()), "\n".join(map(str, ended.values()))
    runs = [outcome for command, outcome in ended.items() if "train_accel.py" in command]
    assert len(runs) == 3
    losses = [[(line["train_loss"], line["val_loss"]) for line in outcome.metrics] for outcome in runs]
    assert len(losses[0]) == 2
    assert losses == [losses[0]] * 3
    assert all(outcome.result and outcome.result["world_size"] == 2 for outcome in runs)


@pytest.mark.slow
def test_the_hand_written_script_trains(ended: dict[str, Ended]) -> None:
    (outcome,) = (outcome for command, outcome in ended.items() if "by_hand.py" in command)
    first, second = map(float, re.findall(r"^epoch \d  val loss (.*)$", outcome.stdout, re.M))
    assert second < first < 2.0


def test_each_numbered_line_of_the_script_is_explained() -> None:
    script = (ROOT / "docs" / "by_hand.py").read_text()
    numbers = re.findall(r"# \((\d+)\)$", script, re.M)
    assert numbers == re.findall(r"^\| \((\d+)\) ", LAUNCHING, re.M)
    assert len(numbers) == 11


def test_blocks_that_are_left_out_say_why() -> None:
    for text in (LAUNCHING, MACHINES):
        assert "`# not tested:`" in text  # the rule stands on the page
    assert len(re.findall(r"^# not tested: \S.{10,}$", MACHINES, re.M)) == MACHINES.count("```bash\n#")


def test_accelerate_config_asks_the_questions_of_the_table() -> None:
    asked = inspect.getsource(cluster) + inspect.getsource(config)
    (table,) = re.findall(r"^\| Question \| Answer \|\n\| --- \| --- \|\n(.*?)\n\n", MACHINES, re.M | re.S)
    questions = [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()]
    assert len(questions) > 10
    for question in questions:
        words = question.rstrip("?")
        assert words in asked or words.replace("GPU(s)", "{machine_type}") in asked, question
