"""Graphs with free sizes: what compiles once, and what exports."""

import timm
import torch


def graphs_of(model, inputs):
    """Graphs that torch.compile makes for these inputs, one after the other."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for x in inputs:
        torch.testing.assert_close(compiled(x), model(x))
    return len(graphs)


@torch.no_grad()
def test_batches_of_any_size_share_one_graph_after_the_first():
    model = timm.create_model("flash_gau_pico", depth=2).eval()
    assert graphs_of(model, [torch.randn(b, 3, 32, 32) for b in (2, 3, 5, 8)]) == 2


@torch.no_grad()
def test_images_of_any_size_share_the_graph_of_a_quadratic_model():
    model = timm.create_model("flash_quad_tiny", depth=2).eval()
    sizes = [(224, 224), (256, 240), (288, 256), (320, 272)]
    assert graphs_of(model, [torch.randn(2, 3, *size) for size in sizes]) == 2


@torch.no_grad()
def test_a_quadratic_model_exports_with_free_batch_height_and_width():
    model = timm.create_model("flash_quad_tiny", depth=2).eval()
    free = torch.export.Dim.DYNAMIC
    shapes = ({0: free, 2: free, 3: free},)
    exported = torch.export.export(model, (torch.randn(2, 3, 224, 256),), dynamic_shapes=shapes).module()
    for size in ((3, 192, 320), (1, 231, 333)):
        x = torch.randn(size[0], 3, *size[1:])
        torch.testing.assert_close(exported(x), model(x), rtol=1e-4, atol=1e-5)
