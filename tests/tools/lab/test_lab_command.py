"""`portattn lab`: what it prints, its exit statuses, and that it takes back what it gave."""

from unittest.mock import Mock

import pytest
from cli.conftest import portattn as portattn

from portattn.tools.lab import creating, folders, toolchains


def test_list_create_remove(portattn, publish) -> None:
    publish()
    called = portattn("lab", "list", "--json")
    assert [row["toolchain"] for row in called.json["toolchains"]] == list(toolchains())
    assert {row["state"] for row in called.json["toolchains"]} == {"missing"}

    called = portattn("lab", "create", "triton==9.1.0", "--json", exits=0)
    (made,) = called.json["environments"]
    assert made["versions"] == {"triton": "9.1.0"}
    assert "triton==9.1.0: ready" in called.err  # progress

    row = portattn("lab", "list", "--json").json["toolchains"][-1]
    assert (row["toolchain"], row["state"], row["bytes"]) == ("triton==9.1.0", "made", made["bytes"])
    (folders.folder_of("triton==9.1.0") / folders.MARKER).unlink()
    text = portattn("lab", "list").out
    for part in ("broken", "environment.json is missing", "0 environments, 0 MB"):
        assert part in text

    assert portattn("lab", "remove", "triton==9.1.0", "--json").json["removed"][0]["bytes"] > 500
    assert "there is no lab environment to remove" in portattn("lab", "remove", "triton==9.1.0", exits=2).err


def test_one_that_cannot_be_made_is_red_and_the_others_are_made(portattn, publish) -> None:
    publish()
    called = portattn("lab", "create", "triton==9.2.0", "triton==9.1.0", "--json", exits=1)
    assert [one["toolchain"] for one in called.json["environments"]] == ["triton==9.1.0"]
    (failed,) = called.json["failed"]
    assert "No matching distribution found for triton==9.2.0" in failed["error"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["create"], "name toolchains as NAME==VERSION, or give --all"),
        (["create", "--all", "triton==3.4.0"], "goes without toolchains"),
        (["create", "triton=3.4.0"], "lab: toolchain is 'triton=3.4.0', but must be NAME==VERSION"),
        (["create", "triton==3.4.0", "--python", "/bin/false"], "--python is '/bin/false', but must be a CPython"),
        (["remove", "flagtree==0.3.0"], "must be one of triton, triton-ascend"),
    ],
)
def test_bad_input_is_one_line_and_status_2(portattn, line: list[str], message: str) -> None:
    assert message in portattn("lab", *line, exits=2).err
    assert not list(folders.root().glob("[!.]*/"))


def test_an_interrupt_ends_it_and_leaves_nothing(portattn, publish, monkeypatch) -> None:
    publish()
    monkeypatch.setattr(creating, "_tried", Mock(side_effect=KeyboardInterrupt))
    assert "nothing half made is left" in portattn("lab", "create", "triton==9.1.0", exits=130).err
    assert [path for path in folders.root().iterdir() if path.suffix != ".lock"] == []
