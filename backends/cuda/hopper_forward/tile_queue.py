"""How the Hopper forward's producer tells its consumers which tile is next: messages in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from portattn.backends.cuda.hopper_forward.form import Work
from portattn.backends.cuda.hopper_forward.fragments import following

FIELDS: gl.constexpr = gl.constexpr(8)  # of a message, as many as Work has
BOXES: gl.constexpr = gl.constexpr(2)


@gluon.jit
def send(work, box, phase, shared, form):
    """Send a tile's Work to the consumers."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(shared.mail_free.index(box), phase)
    at = box * FIELDS
    shared.mail.index(at).store(gl.full([1], 0, gl.int32, one) + work.row)
    shared.mail.index(at + 1).store(gl.full([1], 0, gl.int32, one) + work.head)
    shared.mail.index(at + 2).store(gl.full([1], 0, gl.int32, one) + work.slot)
    shared.mail.index(at + 3).store(gl.full([1], 0, gl.int32, one) + work.q_first)
    shared.mail.index(at + 4).store(gl.full([1], 0, gl.int32, one) + work.q_length)
    shared.mail.index(at + 5).store(gl.full([1], 0, gl.int32, one) + work.k_first)
    shared.mail.index(at + 6).store(gl.full([1], 0, gl.int32, one) + work.k_length)
    shared.mail.index(at + 7).store(gl.full([1], 0, gl.int32, one) + work.split)
    mbarrier.arrive(shared.mail_full.index(box), count=1)
    return following(box, phase, BOXES)


@gluon.jit
def read(box, shared):
    """The message in a box."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = box * FIELDS
    return Work(
        gl.max(shared.mail.index(at).load(one), 0),
        gl.max(shared.mail.index(at + 1).load(one), 0),
        gl.max(shared.mail.index(at + 2).load(one), 0),
        gl.max(shared.mail.index(at + 3).load(one), 0),
        gl.max(shared.mail.index(at + 4).load(one), 0),
        gl.max(shared.mail.index(at + 5).load(one), 0),
        gl.max(shared.mail.index(at + 6).load(one), 0),
        gl.max(shared.mail.index(at + 7).load(one), 0),
    )
