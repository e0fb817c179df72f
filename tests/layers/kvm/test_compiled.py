"""torch.compile around the operator."""

import torch

from .test_operator import SPECS, close, gradients, inputs, run


def test_the_operator_is_left_out_of_a_compiled_graph():
    """Its loop over chunks would be unrolled; what is around it is compiled."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, dynamic=False)
    def compiled(*leaves):
        q, *others = leaves
        return run([q * 2, *others], SPECS["growing"])[0] * 3

    leaves = inputs(50)
    q, *others = leaves
    y, want = compiled(*leaves), run([q * 2, *others], SPECS["growing"])[0] * 3
    assert [sum(node.op == "call_function" for node in graph.graph.nodes) for graph in graphs] == [1, 1]
    close([y], [want], 1e-12)
    close(gradients(leaves, y), gradients(leaves, want), 1e-11)
