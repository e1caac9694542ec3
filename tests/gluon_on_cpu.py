"""Gluon's kernels without a GPU: their own source, run by threads, one for each group of warps.

Triton's interpreter does not run Gluon. Here copies come late and in any order, barriers have
counts and phases, and products read their operands until they are waited for: what is not there in
time, or does not stay, is missed. A group is one thread: what its warps do to each other is not
seen.
"""

import builtins
import importlib
import inspect
import queue
import random
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import mercer.backends.triton

HOME = "mercer.backends.triton"
FOLDER = Path(mercer.backends.triton.__file__).parent
PATIENCE = 30.0
# Of what programs add to the same memory.
ADDING = threading.Lock()


class Pointer:
    def __init__(self, tensor, offset=0):
        self.flat, self.offset = tensor.view(-1), offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other):
        found = object.__new__(Pointer)
        found.flat, found.offset, found.dtype = self.flat, self.offset + other, self.dtype
        return found


def load(pointer, mask=True, other=0.0, cache_modifier=None):
    offset = torch.as_tensor(pointer.offset)
    mask = torch.as_tensor(mask).expand(offset.shape)
    found = pointer.flat[torch.where(mask, offset, 0)]
    return torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype))


def store(pointer, x, mask=True):
    offset = torch.as_tensor(pointer.offset)
    mask = torch.as_tensor(mask).expand(offset.shape)
    x = torch.as_tensor(x).expand(offset.shape)
    pointer.flat[offset[mask]] = x[mask].to(pointer.flat.dtype)


class Descriptor:
    """Of [B, H, T, D], in blocks of rows and columns."""

    def __init__(self, tensor, rows=64, columns=None):
        self.tensor, self.dtype = tensor, tensor.dtype
        self.block = (rows, columns or tensor.shape[3])

    def _part(self, at):
        b, h, row, column = (int(n) for n in at)
        assert 0 <= b < self.tensor.shape[0]
        assert 0 <= h < self.tensor.shape[1]
        return self.tensor[b, h, row : row + self.block[0], column : column + self.block[1]]

    def read(self, at):
        part, found = self._part(at), self.tensor.new_zeros(self.block)
        found[: part.shape[0], : part.shape[1]] = part
        return found

    def write(self, at, x, add=False):
        part = self._part(at)
        found = x[: part.shape[0], : part.shape[1]]
        part.copy_(part + found if add else found)


class Barrier:
    def __init__(self):
        self.changed, self.count = threading.Condition(), None

    def init(self, count):
        self.count = self.left = count
        self.bytes = self.phase = 0

    def move(self, arrivals=0, size=0):
        with self.changed:
            assert arrivals <= self.left, "more have come than were asked for"
            self.left -= arrivals
            self.bytes += size
            if self.left == 0 and self.bytes == 0:
                self.left = self.count
                self.phase += 1
            self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase % 2 != int(parity), PATIENCE)
        assert done, "it waits for ever"


class Shared:
    """Shared memory, with arbitrary initial content."""

    def __init__(self, data, barriers=None):
        self.data, self.dtype, self.barriers = data, data.dtype, barriers

    def index(self, n):
        if self.barriers is not None:
            return self.barriers[int(n)]
        return Shared(self.data[int(n)])

    def permute(self, order):
        return Shared(self.data.permute(order))

    def load(self, layout):
        return self.data.clone()

    def store(self, x):
        self.data.copy_(x)


def allocate(dtype, shape, layout):
    if dtype is torch.int64:
        return Shared(torch.zeros(shape), [Barrier() for _ in range(shape[0])])
    anything = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max - 5
    return Shared(torch.full(shape, anything, dtype=dtype))


def bits(x, dtype):
    """Reinterpret the 32 bits of numbers as another dtype."""
    if dtype is torch.uint32:
        return x.to(torch.int64) & (2**32 - 1)
    return (x if x.is_floating_point() else x.to(torch.int32)).view(dtype)


class Engine:
    """Asynchronous copies, completed late and in any order, and those not waited for yet."""

    def __init__(self, seed):
        self.random, self.local, self.open = random.Random(seed), threading.local(), queue.Queue()
        self.lock, self.all_stores = threading.Lock(), []

    def pause(self, longest=0.001):
        with self.lock:
            wait = self.random.random()
        if wait < 0.3:
            time.sleep(wait / 0.3 * longest)

    def _later(self, work, longest=0.001):
        def run():
            self.pause(longest)
            work()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def load(self, descriptor, at, barrier, target):
        at = [int(n) for n in at]
        size = target.data.numel() * 2

        def work():
            target.store(descriptor.read(at))
            barrier.move(size=-size)

        target.data.fill_(float("nan"))
        self._later(work)

    def store(self, descriptor, at, source, add=False):
        at, left = [int(n) for n in at], threading.Event()

        def work():
            found = source.data.clone()
            left.set()
            # It has left, but lies in memory only later.
            self.pause(longest=0.03)
            with ADDING:
                descriptor.write(at, found, add)

        # Longer than a group takes for a few blocks, at times.
        thread = self._later(work, longest=0.03)
        self.stores().append(left)
        self.local.writes.append(thread)
        self.all_stores.append(thread)

    def add(self, descriptor, at, source):
        self.store(descriptor, at, source, add=True)

    def instruction(self, code, constraints, given, dtype, pure, pack):
        """Those that kernels have in so many words."""
        assert code.startswith("cvt.rni.s32.f32")
        return given[0].round().to(dtype)

    def finish(self):
        """When a kernel ends, all that it has stored lies in memory."""
        for thread in self.all_stores:
            thread.join()

    def atomic_add(self, pointer, x, sem, scope):
        """What was there before."""
        self.pause(longest=0.03)
        with ADDING:
            at = torch.as_tensor(pointer.offset)
            found = pointer.flat[at].clone()
            pointer.flat[at] += x
        return found

    def stores(self):
        if not hasattr(self.local, "stores"):
            self.local.stores, self.local.writes, self.local.products = [], [], []
        return self.local.stores

    def store_wait(self, pending):
        while len(self.stores()) > pending:
            self.stores().pop(0).wait()

    def multiply(self, a, b, acc, use_acc=True, is_async=False):
        self.stores()
        operands = [x.data if isinstance(x, Shared) else x for x in (a, b)]
        before = [x.clone() for x in operands]
        out = operands[0].float() @ operands[1].float()
        if is_async:
            self.local.products.append((operands, before))
        return acc + out if use_acc else out

    def products_wait(self, pending, values):
        self.stores()
        products = self.local.products
        while len(products) > pending:
            for now, before in zip(*products.pop(0), strict=True):
                same = torch.allclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
                assert same, "overwritten before it was used"
        return values if len(values) > 1 else values[0]


def module(name, programs, seed):
    """Import one of our kernel modules with this module in place of Triton."""
    engine, place = Engine(seed), SimpleNamespace(id=0, row=0, rows=1)

    def jit(fn=None, **_):
        return fn if fn is not None else jit

    def specialize(parts, *_):
        failures = []

        def run(fn, args):
            try:
                fn(*args)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def both(fn):
        return lambda a, b: fn(torch.as_tensor(a), torch.as_tensor(b))

    def where(condition, a, b):
        return torch.where(torch.as_tensor(condition), a, b)

    layout = lambda *_, **__: None  # noqa: E731
    language = SimpleNamespace(
        constexpr=lambda x: x, static_range=range, where=where, load=load, store=store,
        atomic_add=engine.atomic_add, range=lambda *ends, **_: range(*ends),
        minimum=both(torch.fmin), maximum=both(torch.fmax), abs=torch.abs, exp=torch.exp,
        exp2=torch.exp2, log2=torch.log2, sum=torch.sum, max=torch.amax, min=torch.amin,
        split=lambda x: x.unbind(-1),
        sqrt=torch.sqrt, trans=torch.t,
        float32=torch.float32, int32=torch.int32, uint32=torch.uint32, int64=torch.int64,
        float16=torch.float16, int8=torch.int8,
        bits=bits, inline_asm_elementwise=engine.instruction,
        arange=lambda a, b, _=None: torch.arange(a, b),
        zeros=lambda shape, dtype, _=None: torch.zeros(shape, dtype=dtype),
        full=lambda shape, x, dtype, _=None: torch.full(shape, x, dtype=dtype),
        convert_layout=lambda x, _: x, program_id=lambda n: torch.tensor((place.id, place.row)[n]),
        num_programs=lambda n: torch.tensor((programs, place.rows)[n]),
        allocate_shared_memory=allocate, warp_specialize=specialize, barrier=engine.pause,
        BlockedLayout=layout, SliceLayout=layout, NVMMADistributedLayout=layout,
        DotOperandLayout=layout, NVMMASharedLayout=layout,
        SwizzledSharedLayout=layout, shared_memory_descriptor=Shared,
    )  # fmt: skip
    hopper = SimpleNamespace(
        fence_async_shared=engine.pause, warpgroup_mma=engine.multiply,
        warpgroup_mma_init=lambda x: x, warpgroup_mma_wait=engine.products_wait,
        mbarrier=SimpleNamespace(
            MBarrierLayout=layout, init=lambda bar, count: bar.init(count),
            wait=lambda bar, parity: (engine.pause(), bar.wait(parity)),
            expect=lambda bar, size: bar.move(1, size), arrive=lambda bar, count: bar.move(count),
        ),
        tma=SimpleNamespace(
            async_load=engine.load, async_store=engine.store, store_wait=engine.store_wait,
            async_atomic_add=engine.add,
        ),
    )  # fmt: skip
    gluon = SimpleNamespace(jit=jit, constexpr_function=lambda fn: fn, language=language)
    sources = {
        "triton": SimpleNamespace(jit=jit, constexpr_function=lambda fn: fn, language=language),
        "triton.language": language,
        "triton.experimental": SimpleNamespace(gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
    }

    def find(name, globals=None, locals=None, fromlist=(), level=0):
        if name in sources:
            return sources[name]
        if not level:
            return builtins.__import__(name, globals, locals, fromlist, level)
        package = globals["__name__"].split(".")[:-level]
        path = ".".join([*package, *filter(None, [name])])
        if not path.startswith(HOME):
            return importlib.import_module(path)
        if (FOLDER.joinpath(*path.split(".")[HOME.count(".") + 1 :])).is_dir():
            return SimpleNamespace(**{n: read(f"{path}.{n}") for n in fromlist})
        return read(path)

    def read(path):
        if path not in sources:
            space = {"__name__": path, "__builtins__": {**vars(builtins), "__import__": find}}
            file = FOLDER.joinpath(*path.split(".")[HOME.count(".") + 1 :]).with_suffix(".py")
            text = file.read_text().replace(
                "import triton.language as tl", "from triton import language as tl"
            )
            # Tensors of torch do not know of it.
            text = re.sub(
                r"(\(.*?\)|\w+)\.to\((\w+)\.(\w+), bitcast=True\)", r"\2.bits(\1, \2.\3)", text
            )
            text = text.replace(".type.layout", ".layout")
            exec(compile(text, str(file), "exec"), space)
            sources[path] = SimpleNamespace(**space)
        return sources[path]

    found = read(f"{HOME}.{name}")

    def run(kernel, given, program=0, row=0):
        """One program of a kernel; what is not given is 0."""
        place.id, place.row = program, row
        fn = getattr(found, kernel)
        fn(**{name: given.get(name, 0) for name in inspect.signature(fn).parameters})
        engine.finish()

    found.place, found.run = place, run
    return found
