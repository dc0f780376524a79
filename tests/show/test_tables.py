"""Test tables whose columns are stated once, on terminals, in Markdown and on pages."""

from io import StringIO

from rich.console import Console

from fastcomm.show import console, pages
from fastcomm.show.tables import ResultTable, TableCell, TableColumn, markdown

COLUMNS = (
    TableColumn("kernel", "name"),
    TableColumn("total", "total_ns", "ns", "kernels.rows.total_ns", why="there is no clock"),
    TableColumn("per step", lambda row: row["total_ns"], "ns", only="terminal", drop=1),
    TableColumn("share", "share", "share", "kernels.rows.share", digits=2),
    TableColumn("rank", lambda row: TableCell(value=row["rank"], text=f"rank {row['rank']}")),
    TableColumn("from", lambda row: row["name"][0], only="page"),
)
ROWS = (
    {"name": "gemm[bold]|x", "total_ns": 1500, "share": 0.5, "rank": 10},
    {"name": "copy", "total_ns": None, "share": -0.25, "rank": 9},
)
TABLE = ResultTable(
    name="t", caption="Kernels", columns=COLUMNS, rows=ROWS, heading="longest kernels"
)


def printed(table, width=100):
    """The lines that a terminal shows."""
    out = StringIO()
    Console(file=out, width=width, no_color=True).print(console.shown(table))
    return out.getvalue().splitlines()


def test_a_terminal_shows_its_columns_and_the_heading_of_the_table():
    heading, first, second = printed(TABLE)
    assert heading.split() == ["longest", "kernels", "total", "per", "step", "share", "rank"]
    assert first.split() == [
        "gemm[bold]|x",
        "1.50",
        "us",
        "1.50",
        "us",
        "50.00",
        "%",
        "rank",
        "10",
    ]
    assert second.split() == ["copy", "n/a", "n/a", "-25.00", "%", "rank", "9"]


def test_a_narrow_terminal_leaves_out_the_column_to_drop_first():
    assert printed(TABLE, width=47)[-1] == "not shown: per step (--wide shows them)"


def test_a_page_shows_its_columns_with_definitions_reasons_and_values_to_sort_by():
    page = pages.shown(TABLE)
    assert [column.label for column in page.columns] == [
        *("kernel", "total", "share", "rank", "from")
    ]
    assert [column.key for column in page.columns] == [
        *("", "kernels.rows.total_ns", "kernels.rows.share", "", "")
    ]
    assert [column.is_number for column in page.columns] == [False, True, True, False, False]
    name, total, share, rank, _ = page.rows[1]
    assert (name.text, total.text, total.why) == ("copy", "n/a", "there is no clock")
    assert (share.text, share.sort) == (pages.percent(-0.25), -0.25)
    assert (rank.text, rank.sort) == ("rank 9", 9)


def test_markdown_has_the_columns_of_a_terminal_and_inert_names():
    assert markdown(TABLE.top(1)) == [
        "| longest kernels | total | per step | share | rank |",
        "| --- | ---: | ---: | ---: | --- |",
        "| `gemm[bold]\\|x` | 1.50 us | 1.50 us | 50.00 % | rank 10 |",
    ]


def test_columns_that_are_unknown_in_all_rows_are_left_out():
    table = ResultTable(name="t", caption="", columns=COLUMNS, rows=ROWS[1:])
    labels = [column.label for column in table.without_unknown().columns]
    assert labels == ["kernel", "share", "rank", "from"]


def test_many_columns_of_sentences_are_left_out_before_headings_break_into_letters():
    out = StringIO()
    names = [f"heading_{number}" for number in range(12)]
    table = console.table("first", *names, texts=names)
    table.add_row("one", *["some longer text of a cell"] * 12)
    Console(file=out, width=80, no_color=True).print(table)
    lines = out.getvalue().splitlines()
    assert "heading_0" in lines[0]
    assert not any(line.strip() in set("heading_") for line in lines)
    assert "not shown: " in out.getvalue()
    assert "heading_11 (--wide shows them)" in " ".join(out.getvalue().split())
