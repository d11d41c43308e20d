"""No circle of files, type-only imports included; import-linter checks the layers."""

from __future__ import annotations

import grimp
import networkx


def test_no_files_import_each_other_in_a_circle():
    imports = grimp.build_graph("resihp", "detector", "scheduler", "service", cache_dir=None)
    graph = networkx.DiGraph()
    for module in imports.modules:
        for imported in imports.find_modules_directly_imported_by(module):
            graph.add_edge(module, imported)
    circles = [sorted(some) for some in networkx.strongly_connected_components(graph)]
    assert [circle for circle in circles if len(circle) > 1] == []
