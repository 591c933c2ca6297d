"""Opens the database of a history, a file of SQLite or a server of PostgreSQL, and brings its tables up to date."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url

from lowtide.leakcheck.history.errors import HistoryError

_MIGRATIONS = Path(__file__).with_name("migrations")

NEWEST = "0001"
"""The revision of the newest migration."""

_LOCK = 0x6C6F7774
"""Of PostgreSQL's advisory locks, the one that writers of a history take."""

_PATIENCE_S = 60
"""How long a writer waits for another one, in seconds."""


def open_database(address: str) -> Engine:
    """The database at an address, with today's tables.

    Args:
        address: a URL (`postgresql://HOST/NAME`, `sqlite:///FILE`), or the path of a file of SQLite.

    Raises:
        HistoryError: it cannot be opened, or is newer than this lowtide.
    """
    engine = _engine(_url(address))
    try:
        with writing(engine) as connection:
            _migrate(connection)
    except BaseException:
        engine.dispose()
        raise
    return engine


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction in which no other writer of the history is at work.

    Writers take turns, for milliseconds each; otherwise two that add the same new subject at once would end in a
    conflict or in a deadlock.

    Raises:
        HistoryError: the database refused what was done, or another writer took too long.
    """
    with _errors_translated(engine), engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.text(f"SET LOCAL lock_timeout = '{_PATIENCE_S}s'"))
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that sees one state of the history.

    Raises:
        HistoryError: the database refused what was done.
    """
    level = "REPEATABLE READ" if engine.dialect.name == "postgresql" else "SERIALIZABLE"
    with _errors_translated(engine), engine.connect().execution_options(isolation_level=level) as connection:
        yield connection


def _url(address: str) -> URL:
    if "://" not in address:
        return URL.create("sqlite", database=address)
    try:
        url = make_url(address)
    except sa.exc.ArgumentError as error:
        raise HistoryError("the history's address cannot be read: use postgresql://HOST/NAME, or a file") from error
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    return url


def _engine(url: URL) -> Engine:
    name = url.get_backend_name()
    if name not in ("sqlite", "postgresql"):
        raise HistoryError(f"a history in {name} is not supported: use postgresql://HOST/NAME, or a file")
    try:
        if name == "postgresql":
            return sa.create_engine(url)
        engine = sa.create_engine(url, connect_args={"timeout": _PATIENCE_S})
    except sa.exc.NoSuchModuleError as error:
        raise HistoryError(f"{url.drivername} is no driver that there is: use postgresql://HOST/NAME") from error
    except ModuleNotFoundError as error:
        raise HistoryError(f'{error.name} is not installed: pip install "lowtide[postgresql]"') from error
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: Any) -> None:
    # Python's module would otherwise begin transactions by itself, and never before a CREATE or a SELECT.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")


def _begin_sqlite(connection: Connection) -> None:
    # At once for writing: a transaction that begins with reading fails if another one has written meanwhile.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _migrate(connection: Connection) -> None:
    if sa.inspect(connection).has_table("alembic_version"):
        found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars().all()
        if found == [NEWEST]:
            return
    # Only where there is something to do: it takes as long to load as all the rest of the command.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise HistoryError("the history was written by a newer lowtide: install that version to use it") from error


@contextmanager
def _errors_translated(engine: Engine) -> Iterator[None]:
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        said = str(getattr(error, "orig", None) or error).strip().partition("\n")[0] or type(error).__name__
        where = engine.url.render_as_string(hide_password=True)
        raise HistoryError(f"the history {where} cannot be used: {said}") from error
