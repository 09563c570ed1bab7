"""What is written down before it is used, and found again by whoever goes on."""

from etils import epath

from dynrl.journal import Journal


def test_facts_outlive_the_process_and_torn_lines_do_not(tmp_path):
    first = Journal(epath.Path(tmp_path), 0)
    assert first.get("timeout", 3, 0, 1) is None
    first.write(("timeout", 3, 0, 1), [0, 2])
    Journal(epath.Path(tmp_path), 1).write(("deadline", 4, 1, 1), 17)
    with (tmp_path / "journal_0.jsonl").open("a") as file:
        file.write('[["timeout", 9')  # killed while it wrote
    again = Journal(epath.Path(tmp_path), 0)
    assert again.get("timeout", 3, 0, 1) == [0, 2]
    assert again.get("deadline", 4, 1, 1) == 17
    assert again.get("timeout", 9) is None
    again.write(("deadline", 5, 0, 1), 3)  # behind the torn line
    assert Journal(epath.Path(tmp_path), 0).get("deadline", 5, 0, 1) == 3


def test_without_a_workdir_facts_last_for_a_life():
    journal = Journal()
    journal.write(("a", 1), 2)
    assert journal.get("a", 1) == 2


def test_facts_of_another_configuration_do_not_count(tmp_path):
    folder = epath.Path(tmp_path)
    Journal(folder, 0, "short deadline").write(("timeout", 3, 0, 1), [0])
    longer = Journal(folder, 0, "long deadline")
    assert longer.get("timeout", 3, 0, 1) is None
    longer.write(("timeout", 4, 0, 1), [1])
    again = Journal(folder, 0, "long deadline")
    assert (again.get("timeout", 3, 0, 1), again.get("timeout", 4, 0, 1)) == (None, [1])
    assert Journal(folder, 0, "short deadline").get("timeout", 3, 0, 1) == [0]
