"""The questions that the model that comes with qwenc is trained on and asked: one right answer each, and fresh where they have to be."""

import itertools
import random
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from embedded_data import Fact, haystack, make_facts, make_name, needle_prompt, prose, read_verses, words_of

VERSES = [("Ge", str(1 + i // 20), f"Verse {i} of the tale, and the house of Nahor was full of people;") for i in range(200)]
PIECES = prose(VERSES)
WORDS = words_of(PIECES)


def length_of(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_needle_stands_once_at_its_depth_within_the_budget(depth):
    for seed in range(20):
        user, fact = needle_prompt(random.Random(seed), PIECES, WORDS, depth, 400, length_of)
        before, after = user.split(fact.sentence)
        body = after.removesuffix("\n" + fact.question)
        assert body != after and user.count(fact.value) == 1
        assert 380 <= length_of(user) <= 400
        assert length_of(before) / length_of(before + body) == pytest.approx(depth, abs=0.05)


def test_several_facts_keep_their_order_and_the_prose_is_whole():
    facts = [Fact("age", name, value) for name, value in (("Ezra", "10"), ("Noah", "20"), ("Ruth", "30"))]
    body = haystack(random.Random(1), PIECES, list(zip((0.8, 0.2, 0.5), facts, strict=True)), 300, length_of)
    assert [fact.name for _, fact in body if fact] == ["Noah", "Ruth", "Ezra"]
    numbers = [int(number) for text, fact in body if not fact for number in re.findall(r"Verse (\d+)", text)]
    assert len(numbers) > 10 and all((later - earlier) % len(VERSES) == 1 for earlier, later in itertools.pairwise(numbers))


def test_names_to_be_judged_by_are_never_trained_on():
    rng = random.Random(2)
    kept, trained = ({make_name(rng, WORDS, held_out).lower() for _ in range(2000)} for held_out in (True, False))
    assert len(kept) > 20 and len(trained) > 200 and not kept & trained


def test_no_two_facts_answer_one_question():
    facts = make_facts(random.Random(3), WORDS, 60)
    assert len({fact.name.lower() for fact in facts}) == 60


def test_verses_are_read_from_a_file(tmp_path):
    path = tmp_path / "bible.txt"
    path.write_text("Ge1:1 In the beginning.\nGe1:2 And the earth.\nGe2:1 Thus.\n1Jn1:1 That which was.\n\nnotes\n", encoding="utf-8")
    verses = read_verses(path)
    assert [verse[:2] for verse in verses] == [("Ge", "1"), ("Ge", "1"), ("Ge", "2"), ("1Jn", "1")]
    assert "".join(prose(verses)) == "\nIn the beginning. And the earth.\nThus.\nThat which was."
