"""Tasks and rewards: the same prompt everywhere, and reasoning-gym's score untouched."""

from pathlib import Path

import pytest

from echo_p2p.errors import ConfigError
from echo_p2p.rl.rewards import call_reward, load_reward, rewards
from echo_p2p.rl.tasks import load_sokoban, load_task


def test_the_same_name_seed_and_index_give_the_same_prompt() -> None:
    first, second = load_task("sokoban", 1), load_task("sokoban", 1)
    backwards = {index: second.prompt(index) for index in reversed(range(20))}
    assert all(first.prompt(index) == backwards[index] for index in range(20))


def test_neighbouring_seeds_share_no_sequence_of_boards() -> None:
    first, second = load_task("sokoban", 1), load_task("sokoban", 2)
    boards = {first.prompt(index) for index in range(50)}
    assert sum(second.prompt(index) in boards for index in range(50)) < 10


def test_a_board_is_six_rows_with_one_box_and_one_player() -> None:
    task = load_task("sokoban", 3)
    for index in range(20):
        board = task.prompt(index)
        assert [len(row) for row in board.splitlines()] == [6] * 6
        assert board.count("@") == 1
        assert board.count("*") + board.count("%") == 1


def test_the_full_question_is_a_setting() -> None:
    question = load_task("sokoban", 3, prompt="question").prompt(0)
    assert "sokoban" in question
    assert load_task("sokoban", 3).prompt(0) in question.replace(" ", "")


def test_the_solver_solves_and_garbage_does_not() -> None:
    task = load_sokoban(4)
    assert [task.score(index, f" {task.item(index)['answer']}\n") for index in range(30)] == [1.0] * 30
    for garbage in ("", "no idea", "LLLLLLLLLLLLLLLLLLLL", "\x00", "left, down"):
        assert sum(rewards(task, index, [garbage])[0] for index in range(30)) / 30 <= 0.1


def test_the_score_is_that_of_reasoning_gym() -> None:
    import reasoning_gym

    task = load_sokoban(5)
    scorer = reasoning_gym.get_score_answer_fn("sokoban")
    for index in range(10):
        for answer in ("LDUR", "UUU", task.item(index)["answer"], "RRDL"):
            assert task.score(index, answer) == scorer(answer, task.item(index))


def test_any_data_set_of_reasoning_gym_is_a_task() -> None:
    task = load_task("rg:basic_arithmetic", 1, min_terms=2, max_terms=2)
    assert task.size > 1000
    assert task.prompt(7) == load_task("rg:basic_arithmetic", 1, min_terms=2, max_terms=2).prompt(7)
    assert task.score(7, "nonsense") <= 0.1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("chess", {}),
        ("rg:no_such_set", {}),
        ("rg:basic_arithmetic", {"no_such_setting": 1}),
        ("sokoban", {"depth": 3}),
        ("sokoban", {"prompt": "picture"}),
        ("sokoban", {"width": 90}),
    ],
)
def test_a_wrong_name_or_setting_is_one_sentence(name: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as error:
        load_task(name, 1, **settings)
    assert "\n" not in str(error.value)


def test_an_index_beyond_the_task_is_refused() -> None:
    task = load_task("sokoban", 1, size=10)
    for index in (-1, 10):
        with pytest.raises(ConfigError, match="from 0 to 9"):
            task.prompt(index)


def test_a_reward_file_is_called_by_parameter_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def exact(answer, completion):\n    return completion == answer\n")
    reward = load_reward(f"{file}:exact")
    row = {"prompt": "1+1", "answer": "2", "info": {}}
    assert [call_reward(reward, row, text) for text in ("2", "3")] == [1.0, 0.0]
    with pytest.raises(ConfigError, match="asks for answer"):
        call_reward(reward, {"prompt": "1+1"}, "2")


def test_a_reward_may_take_everything_or_a_default() -> None:
    def everything(**row: object) -> float:
        return float(len(row))

    def default(completion: str, weight: float = 0.5) -> float:
        return weight * len(completion)

    assert call_reward(everything, {"prompt": "", "answer": ""}, "x") == 3.0
    assert call_reward(default, {"prompt": ""}, "xx") == 1.0
    with pytest.raises(ConfigError, match="finite"):
        call_reward(lambda completion: float("nan"), {}, "x")


@pytest.mark.parametrize("name", ["exact", "no.such.module:exact", "/no/such/file.py:exact", "math:no_such_function"])
def test_a_reward_that_does_not_exist_is_one_sentence(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_reward(name)
    assert "\n" not in str(error.value)
