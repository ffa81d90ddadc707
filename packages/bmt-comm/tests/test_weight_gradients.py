"""Backward in two parts gives the gradients of backward in one."""

import copy
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from bmt_comm import defer_weight_gradient, deferred_weight_gradients, deferring, total_gradients


class Marker:
    pass


class Product(torch.autograd.Function):
    """x Wᵀ, with a context that can be watched."""

    markers = None  # to be set to a list

    @staticmethod
    def forward(ctx, note, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.marker = Marker()
        if Product.markers is not None:
            Product.markers.append(weakref.ref(ctx.marker))
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[2] and not defer_weight_gradient(ctx, 1, product_gradient, grad, x):
            grad_weight = product_gradient(grad, x)
        return None, grad @ weight.to(grad.dtype), grad_weight


def product_gradient(grad, x):
    return grad.t() @ x.to(grad.dtype)


class Linear(nn.Linear):
    def forward(self, x):
        return Product.apply("no tensor", x, self.weight)


class Model(nn.Module):
    """Deferring layers with plain ones between them."""

    def __init__(self, checkpointing=None):
        super().__init__()
        self.layers = nn.ModuleList([Linear(6, 6, bias=False) for _ in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(6) for _ in range(3)])
        self.checkpointing = checkpointing

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):

            def part(x, layer=layer, norm=norm):
                return torch.tanh(layer(norm(x)))

            x = part(x) if self.checkpointing is None else checkpoint(part, x, use_reentrant=self.checkpointing)
        return x

    def gradients(self):
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.named_parameters()}


def data(seed, rows=4):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def pair(**options):
    torch.manual_seed(0)
    model = Model(**options)
    return model, copy.deepcopy(model)


def weight(*shape):
    return torch.randn(*(shape or (6, 6)), generator=torch.Generator().manual_seed(9)).requires_grad_()


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        assert value is None or torch.equal(found[name], value), name


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_the_first_part_gives_all_but_the_weights_and_run_gives_those(checkpointing):
    model, plain = pair(checkpointing=checkpointing)
    for step in range(2):  # without and with gradients that are there already
        before = model.gradients()
        x, y = data(step), data(step)
        with deferred_weight_gradients() as deferred:
            torch.autograd.backward([model(x)], [data(5)])
        torch.autograd.backward([plain(y)], [data(5)])
        assert torch.equal(x.grad, y.grad)
        first, expected = model.gradients(), plain.gradients()
        for name, value in expected.items():
            wanted = before[name] if name.startswith("layers") else value
            assert (first[name] is None) if wanted is None else torch.equal(first[name], wanted), name
        assert len(deferred) == 3
        deferred.run()
        assert len(deferred) == 0
        assert_equal(model.gradients(), expected)
        deferred.run()  # does nothing
        assert_equal(model.gradients(), expected)


def test_several_wait_at_a_time_and_other_passes_go_on():
    model, plain = pair()
    waiting = []
    for step in range(3):
        output = model(data(step))
        with deferred_weight_gradients() as deferred:
            output.sum().backward()
        waiting.append(deferred)
        if step == 1:
            waiting.pop(0).run()
    for deferred in waiting:
        deferred.run()
    for step in range(3):
        plain(data(step)).sum().backward()
    assert_equal(model.gradients(), plain.gradients())


def test_only_inputs_and_output_gradients_are_kept():
    layer, before = Linear(6, 6, bias=False), Linear(6, 6, bias=False).requires_grad_(False)
    watched = {}

    def watch(name, tensor):
        watched[name] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def watching(name):
        return lambda grad: watch(name, grad).view_as(grad)

    Product.markers = []
    x = watch("input", torch.tanh(before(data(0))))
    y = layer(x)
    y.register_hook(watching("output gradient"))
    x.register_hook(watching("input gradient"))
    loss = watch("after", torch.tanh(watch("output", y))).square().sum()
    with deferred_weight_gradients() as deferred:
        loss.backward()
    markers, Product.markers = Product.markers, None
    del x, y, loss
    assert [marker() for marker in markers] == [None, None]  # the graph is gone
    assert sorted(name for name, ref in watched.items() if not ref.expired()) == ["input", "output gradient"]
    deferred.run()
    assert all(ref.expired() for ref in watched.values())
    assert layer.weight.grad is not None


def test_tensors_are_let_go_one_after_the_other():
    seen = []

    class Watched(Product):
        @staticmethod
        def backward(ctx, grad):
            x, _ = ctx.saved_tensors
            x = x.clone()
            storages.append(StorageWeakRef(x.untyped_storage()))

            def compute(grad, x):
                seen.append([ref.expired() for ref in storages])
                return product_gradient(grad, x)

            assert defer_weight_gradient(ctx, 1, compute, grad, x)
            return None, grad @ ctx.saved_tensors[1], None

    storages = []
    weights = [weight().detach().requires_grad_() for _ in range(3)]
    x = data(0)
    with deferred_weight_gradients() as deferred:
        for w in weights:
            x = Watched.apply(None, x, w)
        x.sum().backward()
    deferred.run()
    assert seen == [[False, False, False], [True, False, False], [True, True, False]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_weight_that_is_used_twice_gets_the_sum(dtype, autocast):
    x, w = data(0), weight().to(dtype).detach().requires_grad_()

    def loss(x, w):
        with torch.autocast("cpu", enabled=autocast):
            return Product.apply(None, torch.tanh(Product.apply(None, x.to(w.dtype), w)), w).sum()

    loss(x, w).backward()
    expected, w.grad = w.grad, None
    with deferred_weight_gradients() as deferred:
        loss(x, w).backward()
    assert w.grad is None
    deferred.run()
    assert torch.equal(w.grad, expected)


def test_a_weight_of_which_another_use_is_plain():
    x, w = data(0), weight()

    def use(x, w):
        return (Product.apply(None, x, w) * w[0]).sum()

    use(x, w).backward()
    expected, w.grad = w.grad, None
    with deferred_weight_gradients() as deferred:
        use(x, w).backward()
    assert w.grad is not None
    assert w.grad[1:].eq(0).all()
    deferred.run()
    assert torch.equal(w.grad, expected)


def test_gradients_are_accumulated_as_autograd_does():
    w = weight(6, 6).t().detach().requires_grad_()  # not contiguous, and so will be its gradient
    with torch.autocast("cpu"), deferred_weight_gradients() as deferred:
        Product.apply(None, data(0), w).sum().backward()
    deferred.run()
    assert w.grad.dtype == torch.float32
    assert w.grad.stride() == w.stride()
    grad, before = w.grad, w.grad.clone()
    with deferred_weight_gradients() as deferred:
        Product.apply(None, data(0), w).sum().backward()
    deferred.run()
    assert w.grad is grad  # added in place
    torch.testing.assert_close(w.grad, 2 * before, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_weights_that_cannot_wait_get_their_gradients_in_the_first_part():
    x = data(0)
    scaled, hooked, watched, frozen, picked, differentiated = (weight() for _ in range(6))
    hooked.register_hook(lambda grad: 2 * grad)
    steps = []
    watched.register_post_accumulate_grad_hook(lambda p: steps.append(p.grad.clone()))
    frozen.requires_grad_(False)
    once = product_gradient(torch.ones(4, 6), x.detach())
    with deferred_weight_gradients() as deferred:
        for w in (scaled * 3, hooked, watched, frozen):
            Product.apply(None, x, w).sum().backward()
        [grad] = torch.autograd.grad(Product.apply(None, x, picked).sum(), [picked])
        Product.apply(None, x, differentiated).sum().backward(create_graph=True, inputs=[x, differentiated])
    assert len(deferred) == 0
    deferred.run()
    for found, expected in [
        (scaled.grad, 3 * once),
        (hooked.grad, 2 * once),
        (watched.grad, once),
        (grad, once),
        (differentiated.grad, once),
    ]:
        torch.testing.assert_close(found, expected)
    differentiated.grad = None  # holds its graph
    assert len(steps) == 1
    assert frozen.grad is None


def test_backward_towards_some_leaves():
    x, w = data(0), weight()
    with deferred_weight_gradients() as deferred:
        Product.apply(None, x, w).sum().backward(inputs=[x])
    deferred.run()
    assert w.grad is None
    assert x.grad is not None
    with deferred_weight_gradients() as deferred:
        Product.apply(None, x, w).sum().backward(inputs=[w])
    assert len(deferred) == 1
    deferred.run()
    torch.testing.assert_close(w.grad, product_gradient(torch.ones(4, 6), x.detach()))


def test_a_weight_that_is_frozen_meanwhile_gets_none():
    w = weight()
    with deferred_weight_gradients() as deferred:
        Product.apply(None, data(0), w).sum().backward()
    w.requires_grad_(False)
    deferred.run()
    assert w.grad is None


class Nested(torch.autograd.Function):
    """Its backward runs another backward, so many deep: from 60 on, autograd takes another thread."""

    @staticmethod
    def forward(ctx, x, w, depth, threads):
        ctx.save_for_backward(x, w)
        ctx.depth, ctx.threads = depth, threads
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            if ctx.depth:
                Nested.apply(inner, w, ctx.depth - 1, ctx.threads).sum().backward()
            else:
                ctx.threads.append(threading.get_ident())
                Product.apply(None, inner, w).sum().backward()
        return grad, None, None, None


def test_the_threads_that_autograd_takes_know_of_it():
    x, w, threads = data(0), weight(), []
    with deferred_weight_gradients() as deferred:
        Nested.apply(x, w, 65, threads).sum().backward()
    assert threads[0] != threading.get_ident()
    assert w.grad is None
    deferred.run()
    torch.testing.assert_close(w.grad, product_gradient(torch.ones(4, 6), x.detach()))
    again = weight()
    Nested.apply(x, again, 65, threads).sum().backward()
    assert torch.equal(again.grad, w.grad)  # the thread has forgotten


def test_other_threads_are_left_alone():
    inner, outer = weight(), weight()

    def elsewhere():
        assert deferring() is None
        Product.apply(None, data(0), inner).sum().backward()

    with deferred_weight_gradients() as deferred:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(60)
        Product.apply(None, data(0), outer).sum().backward()
    assert outer.grad is None
    assert inner.grad is not None
    assert deferring() is None
    deferred.run()
    assert torch.equal(inner.grad, outer.grad)


def test_blocks_within_each_other():
    first, second, third = weight(), weight(), weight()
    with deferred_weight_gradients() as outer:
        Product.apply(None, data(0), first).sum().backward()
        with deferred_weight_gradients() as inner:
            Product.apply(None, data(0), second).sum().backward()
        assert deferring() is outer
        Product.apply(None, data(0), third).sum().backward()
    inner.run()
    assert first.grad is None
    assert second.grad is not None
    outer.run()
    assert first.grad is not None
    assert third.grad is not None


def test_what_is_abandoned_leaves_no_gradient():
    model, plain = pair()
    with deferred_weight_gradients() as deferred:
        model(data(0)).sum().backward()
    deferred.abandon()
    deferred.run()
    assert all(p.grad is None for p in model.layers.parameters())
    y = model.layers[0](data(1))
    y.register_hook(lambda grad: 1 / 0)
    loss = model.layers[1](y).sum()
    with pytest.raises(ZeroDivisionError), deferred_weight_gradients() as deferred:
        loss.backward()
    assert deferring() is None
    assert len(deferred) == 0
    model.zero_grad()
    with deferred_weight_gradients() as deferred:
        model(data(2)).sum().backward()
    deferred.run()
    plain(data(2)).sum().backward()
    assert_equal(model.gradients(), plain.gradients())


def test_a_tensor_that_was_overwritten_is_an_error():
    w, x = weight(), data(0).detach()
    with deferred_weight_gradients() as deferred:
        Product.apply(None, x, w).sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="written to in place since its backward"):
        deferred.run()
    assert w.grad is None


class Receiver:
    """Collects what comes at once and what comes later."""

    def __init__(self, accepts=True):
        self.accepting, self.arrived, self.late = accepts, None, None

    def accepts(self, output, tensors):
        return self.accepting and output == 1


class Give(torch.autograd.Function):
    """(x, w) from a node that can wait for the gradient of w."""

    @staticmethod
    def forward(ctx, receiver, x, w):
        ctx.set_materialize_grads(False)
        ctx.gradient_receiver = receiver
        return x.clone(), w.clone()

    @staticmethod
    def backward(ctx, grad_x, grad_w):
        receiver = ctx.gradient_receiver
        receiver.arrived = grad_w
        deferred = deferring()
        if deferred is not None:
            gradients = deferred.take(receiver)
            deferred.finish_later(gradients, lambda totals: setattr(receiver, "late", totals))
        return None, grad_x, None


@pytest.mark.parametrize("accepts", [True, False])
def test_a_node_that_can_wait_gets_the_sum_later(accepts):
    x, w, receiver = data(0), weight(), Receiver(accepts)
    with deferred_weight_gradients() as deferred:
        given, entered = Give.apply(receiver, x, w)
        # As a weight, the first output is refused: its gradient has to go on.
        (Product.apply(None, given, entered) + Product.apply(None, given, entered)).sum().backward()
    assert x.grad is not None
    assert receiver.late is None
    assert (receiver.arrived is None) == accepts
    deferred.run()
    found = receiver.late[1] if accepts else receiver.arrived
    assert set(receiver.late) == ({1} if accepts else set())
    torch.testing.assert_close(found, 2 * product_gradient(torch.ones(4, 6), x.detach()))


def test_a_pass_that_failed_keeps_nothing_for_a_node_that_can_wait():
    receiver = Receiver()
    _, entered = Give.apply(receiver, data(0), weight())
    x = torch.tanh(data(0))  # made after, so that its backward comes first
    x.register_hook(lambda grad: 1 / 0)
    y = Product.apply(None, x, entered).sum()
    kept = StorageWeakRef(x.untyped_storage())
    with deferred_weight_gradients() as deferred:
        with pytest.raises(ZeroDivisionError):
            y.backward()
        del x, y
        assert not kept.expired()
    assert kept.expired()
    deferred.run()
    assert receiver.late is None


def test_gradients_can_be_taken_at_once():
    x, w, receiver = data(0), weight(), Receiver()
    with deferred_weight_gradients() as deferred:
        taken = []
        given, entered = Give.apply(receiver, x, w)
        deferred.finish_later = lambda gradients, finish: taken.append(total_gradients(gradients))
        Product.apply(None, given, entered).sum().backward()
    assert len(deferred) == 0
    torch.testing.assert_close(taken[0][1], product_gradient(torch.ones(4, 6), x.detach()))


def test_each_gradient_is_prepared_while_the_one_before_is_computed():
    events = []

    class Prepared(Product):
        @staticmethod
        def forward(ctx, name, x, weight):
            ctx.name = name
            return Product.forward(ctx, name, x, weight)

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            name = ctx.name

            def compute(grad, x):
                events.append(f"compute {name}")
                return product_gradient(grad, x)

            def prepare(grad, x):
                events.append(f"prepare {name}")

            assert defer_weight_gradient(ctx, 1, compute, grad, x, prepare=None if name == "b" else prepare)
            return None, grad @ w, None

    x = data(0)
    with deferred_weight_gradients() as deferred:
        for name in "cba":
            x = Prepared.apply(name, x, weight())
        x.sum().backward()
    deferred.run()
    assert events == ["prepare a", "prepare c", "compute a", "compute b", "compute c"]
