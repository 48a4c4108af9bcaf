"""A small training peer for tests: answers commands between optimizer steps (see `swarm_process`).

Its model is a chain of linear layers in which every parameter starts at one value, so a test can tell whose state a
peer holds. With `lr=0` training leaves the values alone and any change is shoal's; with `lr=1` every step adds 1 to
every parameter, so a state put together from two moments is seen at once.
"""

import contextlib
import hashlib
import importlib
import inspect
import itertools
import json
import os
import signal
import tempfile
import threading
import time
import traceback

import torch
from swarm_process import error_fields, next_command, reply

import shoal

torch.set_num_threads(1)


class Descent(torch.optim.Optimizer):
    """Plain gradient descent, without the second of imports (for torch.compile) that torch's own begin with."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


@contextlib.contextmanager
def speaking(protocol_version):
    """This process speaks another version of the protocol, if one is given."""
    handshake = importlib.import_module("shoal.net.handshake")
    own = handshake.PROTOCOL_VERSION
    handshake.PROTOCOL_VERSION = own if protocol_version is None else protocol_version
    try:
        yield
    finally:
        handshake.PROTOCOL_VERSION = own


class Peer:
    """The commands, by the names of the methods."""

    def __init__(self):
        self.swarm = None
        self.model = None
        self.optimizer = None
        self.training = False
        self.resting = False
        self.pause_seconds = 0.02
        self.steps = 0
        self.seen = []

    def ping(self):
        """Imports are done when this answers."""
        return os.getpid()

    def join(
        self,
        run="birds",
        every_seconds=0.3,
        every_steps=None,
        protocol_version=None,
        listen="127.0.0.1:0",
        **options,
    ):
        if every_seconds is not None or every_steps is not None:
            options["strategy"] = shoal.AllReduce(every_seconds=every_seconds, every_steps=every_steps)
        with speaking(protocol_version):
            self.swarm = shoal.join(run, listen=listen, on_event=self.seen.append, **options)
        return {"address": self.swarm.address, "peer_id": self.swarm.peer_id}

    def attach(self, start=0.0, lr=0.0, layers=(8, 1), bias=True, rests=True):
        """Attach such a model. Until it trains it rests (offers safe points, no steps), or is as good as hung."""
        self.model = torch.nn.Sequential(*(torch.nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(layers)))
        for parameter in self.model.parameters():
            torch.nn.init.constant_(parameter, start)
        optimizer = Descent(self.model.parameters(), lr=lr)
        self.model, self.optimizer = self.swarm.attach(self.model, optimizer, batch_size=4)
        self.resting = rests
        return self.values()

    def train(self, pause_seconds=0.02):
        self.training, self.pause_seconds = True, pause_seconds

    def rest(self):
        """No more steps, but safe points."""
        self.training, self.resting = False, True

    def step(self):
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def values(self):
        """Smallest and largest of all parameters, and a digest of their bytes."""
        digest = hashlib.sha256()
        lows, highs = [], []
        for parameter in self.model.parameters():
            values = parameter.detach()
            digest.update(values.numpy().tobytes())
            lows.append(values.min().item())
            highs.append(values.max().item())
        return {"low": min(lows), "high": max(highs), "digest": digest.hexdigest()}

    def scatter(self, seed):
        """Give every parameter values of its own (the same for one seed)."""
        torch.manual_seed(seed)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter)
        return self.values()

    def address(self):
        return self.swarm.address

    def peers(self):
        return [{"peer_id": peer.peer_id, "role": peer.role, "state": peer.state} for peer in self.swarm.peers()]

    def events(self, kind=None):
        return [
            {"kind": event.kind, "peer_id": event.peer_id, "reason": event.reason, "at_seconds": event.at_seconds}
            for event in list(self.seen)
            if kind in (None, event.kind)
        ]

    def report(self):
        report = self.swarm.report()
        return {
            "averagings": report.averagings,
            "bytes_sent": report.bytes_sent,
            "bytes_received": report.bytes_received,
            "failures": [failure.reason for failure in report.failures],
            "text": str(report),
        }

    def die_after_sending(self, n_bytes, claim):
        """SIGKILL this process once it has sent `n_bytes` more, if no other peer has claimed the file `claim`."""
        until = self.swarm.report().bytes_sent + n_bytes

        def watch():
            while self.swarm.report().bytes_sent < until:
                time.sleep(0.0005)
            try:
                os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()

    def threads(self):
        return sorted(thread.name for thread in threading.enumerate())

    def set_constant(self, module, name, value):
        """Shorten a wait of the library in this process."""
        found = importlib.import_module(module)
        assert type(getattr(found, name)) is type(value)
        setattr(found, name, value)

    def forget(self):
        """Go on as if on another machine: a fresh state folder."""
        os.environ["SHOAL_STATE"] = tempfile.mkdtemp(prefix="state-", dir=os.getcwd())
        return os.environ["SHOAL_STATE"]

    def leave(self):
        self.training = self.resting = False
        self.seen.clear()
        if self.swarm is not None:
            self.swarm.leave()

    def serve(self):
        """Answer commands, and train or rest between them, at a pace that no command disturbs."""
        due = 0.0
        while True:
            if not (self.training or self.resting):
                command = next_command()
            else:
                command = next_command(max(0.0, due - time.monotonic()))
                if time.monotonic() >= due:
                    self.step() if self.training else self.swarm.sync_point()
                    due = time.monotonic() + self.pause_seconds
            if command is None:
                continue
            name = command["command"]
            started = time.monotonic()
            try:
                value = getattr(self, name)(**command["args"])
            except Exception as error:
                seconds = time.monotonic() - started
                reply(reply=name, **error_fields(error), traceback=traceback.format_exc(), seconds=seconds)
            else:
                reply(reply=name, value=json.loads(json.dumps(value)), seconds=time.monotonic() - started)


if __name__ == "__main__":
    Peer().serve()
