"""Reading documents from tables: a row of CSV, TSV, parquet or Arrow is one, its text in a column."""

from __future__ import annotations

import csv
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from hybrid.errors import DataError

from .inputs import Reader


class CsvReader(Reader):
    """The text in each row of a column; the first row has the columns' names."""

    delimiter = ","

    def documents(self) -> Iterator[tuple[str, str]]:
        rows = self._rows()
        header = next(rows, None)
        if header is None:
            self.skips.add("empty file", self.item.label)
            return
        place, names = header
        check_columns(self.item.label, names, self.key)
        if self.key not in names:
            raise no_column(self.item.label, names, self.key)
        column = names.index(self.key)
        for place, row in rows:
            if len(row) != len(names):
                self.bad(f"{len(row)} fields where the header has {len(names)}", place)
            else:
                yield place, row[column]

    def _rows(self) -> Iterator[tuple[str, list[str]]]:
        """Read (place, fields). Of a row that cannot be read the first line is lost; the next is tried as a
        row, as an open quote would take all others with it."""
        csv.field_size_limit(sys.maxsize)
        source = _Lines(self)
        while True:
            source.begin_row()
            place = f"{self.item.label}, line {source.number + 1}"
            try:
                row = next(csv.reader(source, delimiter=self.delimiter, strict=True), None)
            except csv.Error as error:
                source.back_to_second_line()
                self.bad(f"no row ({error})", place)
                continue
            if row is None:
                return
            if row:
                yield place, row
            else:
                self.bad("blank line", place)


class TsvReader(CsvReader):
    """CSV with tabs between the fields."""

    delimiter = "\t"


class _Lines:
    """The decoded lines of a file, which can be gone back in to the second line of the current row."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._lines = reader, reader.lines()
        self._again: deque[str] = deque()
        self._row: list[str] = []
        self.number = 0

    def begin_row(self) -> None:
        self._row = []

    def back_to_second_line(self) -> None:
        self._again.extendleft(reversed(self._row[1:]))
        self.number -= len(self._row) - 1

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._again:
            data = next(self._lines)
            try:
                self._again.append(data.decode("utf-8"))
            except UnicodeDecodeError as error:
                self.number += 1
                place = f"{self._reader.item.label}, line {self.number}, byte {error.start} of the line"
                self._reader.bad(f"invalid UTF-8 ({error.reason})", place)
        self.number += 1
        self._row.append(self._again.popleft())
        return self._row[-1]


class ArrowReader(Reader):
    """The text in each row of a column of an Arrow file or stream."""

    def documents(self) -> Iterator[tuple[str, str]]:
        pyarrow = self._pyarrow()
        number = 0
        try:
            for first, batch in self._batches(pyarrow):
                for number, value in enumerate(_values(batch), first + 1):
                    place = f"{self.item.label}, row {number}"
                    if isinstance(value, UnicodeDecodeError):
                        self.bad(f"invalid UTF-8 ({value.reason})", place)
                    elif (text := self.text_of(value, place)) is not None:
                        yield place, text
        except (pyarrow.ArrowException, OSError) as error:
            self.unreadable(error, f"{self.item.label}, after row {number}")
        if number == 0 and not self.skips.bad:
            self.skips.add("empty file", self.item.label)

    def unreadable(self, error: Exception, place: str, rows: int = 1) -> None:
        """Refuse or count `rows` that cannot be read. Only what is damaged is called so."""
        if isinstance(error, MemoryError):
            raise DataError(
                f"{place}: reading on needs more memory than there is (the file is not damaged); use fewer "
                "data.prepare_processes, or write it with smaller row groups"
            ) from None
        if isinstance(error, NotImplementedError):
            self.bad("a form that pyarrow cannot read", place, f" ({error})", rows)
        else:
            self.bad(f"damaged {self.item.format} file", place, f" ({error})", rows)

    def column(self, names: list[str]) -> str:
        """Find the column that holds the key, or its first part when it names a nested field."""
        check_columns(self.item.label, names, self.key)
        starts = [self.key, *(self.key[:at] for at, character in enumerate(self.key) if character == ".")]
        found = next((start for start in starts if start in names), None)
        if found is None:
            raise no_column(self.item.label, names, self.key)
        return found

    def _pyarrow(self) -> Any:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise DataError(
                f"{self.item.label}: {self.item.format} needs the package pyarrow: "
                'pip install "kvm-hybrid[parquet]"'
            ) from None
        return pyarrow

    def _batches(self, pyarrow: Any) -> Iterator[tuple[int, Any]]:
        """Read (rows before, batch of the wanted column)."""
        with pyarrow.memory_map(self.item.path) as file:
            head = file.read(6)
            file.seek(0)
            if head == b"ARROW1":
                table = pyarrow.ipc.open_file(file)
                batches = (table.get_batch(number) for number in range(table.num_record_batches))
            else:
                table = batches = pyarrow.ipc.open_stream(file)
            name, first = self.column(table.schema.names), 0
            for batch in batches:
                batch = batch.select([name])
                try:
                    batch.validate(full=True)
                except pyarrow.ArrowInvalid as error:
                    if "UTF8" not in str(error):  # that is for single rows to say
                        raise
                yield first, batch
                first += batch.num_rows


class ParquetReader(ArrowReader):
    """The text in each row of a column of a parquet file."""

    def _batches(self, pyarrow: Any) -> Iterator[tuple[int, Any]]:
        """Read by row groups: what is damaged in one costs the rest of that one only."""
        most = 2**31 - 1  # of the footer: large files have one larger than pyarrow's usual limit
        with pyarrow.parquet.ParquetFile(
            self.item.path,
            page_checksum_verification=True,
            thrift_string_size_limit=most,
            thrift_container_size_limit=most,
        ) as file:
            name = self.column(file.schema_arrow.names)
            wanted = self.key if name != self.key else name
            first = 0
            for group in range(file.num_row_groups):
                rows, read = file.metadata.row_group(group).num_rows, 0
                try:
                    for batch in file.iter_batches(row_groups=[group], columns=[wanted], batch_size=256):
                        yield first + read, batch
                        read += batch.num_rows
                except (pyarrow.ArrowException, OSError) as error:
                    places = f"rows {first + read + 1} to {first + rows}"
                    self.unreadable(error, f"{self.item.label}, {places}", rows - read)
                first += rows


def _values(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Convert a batch's rows one by one where one is no UTF-8, which to_pylist fails on as a whole."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    name, column = batch.schema.names[0], batch.column(0)
    for value in column:
        try:
            yield {name: value.as_py()}
        except UnicodeDecodeError as error:
            yield error


def check_columns(label: str, names: list[str], key: str) -> None:
    """Refuse a table with two columns of the wanted name."""
    if names.count(key) > 1:
        raise DataError(
            f"{label} has {names.count(key)} columns named {key!r} (text_key); rename all but one"
        )


def no_column(label: str, names: list[str], key: str) -> DataError:
    """Make the error of a table without the wanted column."""
    return DataError(f"{label} has no column {key!r} (text_key); it has: {', '.join(names)}")
