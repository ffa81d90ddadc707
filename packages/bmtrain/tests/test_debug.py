import pytest

from bmtrain import debug


@pytest.fixture(autouse=True)
def nothing_kept():
    debug.clear()
    yield
    debug.clear()


def test_what_is_set_is_got_until_it_is_cleared():
    debug.set("loss", 1.5)
    debug.set("norm", 2)
    assert debug.get("loss") == 1.5
    debug.set("loss", 2.5)
    assert debug.get("loss") == 2.5
    debug.clear("loss")
    debug.clear("never there")
    assert debug.get("loss") is None
    assert debug.get("norm") == 2
    debug.clear()
    assert debug.get("norm", "gone") == "gone"


def test_lists_grow():
    debug.append("losses", 1)
    debug.append("losses", 2)
    debug.extend("losses", (3, 4))
    debug.extend("others", iter([5]))
    assert debug.get("losses") == [1, 2, 3, 4]
    assert debug.get("others") == [5]


@pytest.mark.parametrize("add", [lambda: debug.append("x", 1), lambda: debug.extend("x", [1])])
def test_something_else_than_a_list_is_not_overwritten(add):
    debug.set("x", 1.5)
    with pytest.raises(TypeError, match="key='x' holds a float, not a list"):
        add()
    assert debug.get("x") == 1.5
