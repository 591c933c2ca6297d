"""Texts that are no Unicode, as the names of files may be: each report has them, in characters."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from lowtide.reports import schema
from lowtide.reports.folder import write_folder
from lowtide.reports.schema import encoded, json_bytes, whole_text
from tests.reports.small_reports import LIFE, finding, report, subject

NAME = os.fsdecode(b"file\xff\xe9")
SPELLED = r"file\udcff\udce9"


def test_a_text_keeps_all_but_lone_surrogates() -> None:
    assert whole_text(f"{NAME} é 模 🌊\x00") == f"{SPELLED} é 模 🌊\x00"


@pytest.mark.parametrize(
    ("value", "decoded"),
    [
        ({NAME: [NAME, 1, None]}, {SPELLED: [SPELLED, 1, None]}),
        ((NAME, b"\xff"), [SPELLED, "/w=="]),
        (["é", {"a": 1.5}], ["é", {"a": 1.5}]),
    ],
)
def test_any_value_can_be_encoded(value: object, decoded: object) -> None:
    assert msgspec.json.decode(json_bytes(value)) == decoded


def test_messages_to_other_processes_can_have_them() -> None:
    found = msgspec.structs.replace(finding(), holder=NAME)
    read = msgspec.msgpack.decode(encoded(msgspec.msgpack.encode, [found]), type=list[schema.Finding])
    assert read == [msgspec.structs.replace(found, holder=SPELLED)]


def test_all_files_of_a_report_are_written(tmp_path: Path) -> None:
    found = msgspec.structs.replace(finding(), message=f"held by {NAME}", holder=NAME, stage=NAME)
    write_folder(report(subject(found, name=f"test[{NAME}]", stages=LIFE)), tmp_path)
    assert schema.read(tmp_path).subjects[0].findings[0].holder == SPELLED
    for file in tmp_path.iterdir():
        file.read_bytes().decode()
