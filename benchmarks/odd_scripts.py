"""Small scripts that use torch in uncommon ways, for `bitwise.py`: each trains something and prints numbers."""

PRELUDE = """
import copy, random, sys
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0); random.seed(0); np.random.seed(0)
def mlp(i=6, o=3): return nn.Sequential(nn.Linear(i, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, o))
def fit(model, loss_of, steps=30, lr=0.05, optimizer=None):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        loss = loss_of(model, step)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if step % 5 == 0: print(step, loss.item())
    return optimizer
X = torch.randn(24, 6); Y = X[:, :3].argmax(1)
def ce(model, step): return F.cross_entropy(model(X), Y)
"""

ODD = {
    "plain_150_steps": "fit(mlp(), ce, 150)",
    "encoder_fast_path": """
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0), 2)
head = nn.Linear(16, 3); x = torch.randn(8, 5, 16); y = torch.randint(3, (8,))
mask = torch.zeros(8, 5, dtype=torch.bool); mask[:, 4] = True
opt = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=1e-3)
for step in range(25):
    encoder.train(); loss = F.cross_entropy(head(encoder(x, src_key_padding_mask=mask).mean(1)), y)
    opt.zero_grad(); loss.backward(); opt.step()
    encoder.eval()
    with torch.no_grad(): out = encoder(x, src_key_padding_mask=mask)
    with torch.inference_mode(): out2 = encoder(x)
    print(loss.item(), out.double().sum().item(), out2.double().sum().item())
""",
    "frozen_encoder_in_eval_with_gradients_on": """
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval().requires_grad_(False)
head = nn.Linear(16, 3); x = torch.randn(8, 5, 16); y = torch.randint(3, (8,))
fit(head, lambda m, s: F.cross_entropy(m(encoder(x).mean(1)), y))
print(encoder(x).double().sum().item())
""",
    "multihead_attention": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.attention = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.1); self.out = nn.Linear(16, 3)
    def forward(self, x):
        y, weights = self.attention(x, x, x, need_weights=True); return self.out(y.mean(1))
net = Net(); x = torch.randn(8, 5, 16); y = torch.randint(3, (8,))
fit(net, lambda m, s: F.cross_entropy(m(x), y)); net.eval()
with torch.no_grad(): print(net(x).double().sum().item())
""",
    "torch_func": """
from torch.func import functional_call, grad, vmap, jacrev
net = mlp(); parameters = dict(net.named_parameters()); net.eval()
def one(p, x, y): return F.cross_entropy(functional_call(net, p, (x[None],)), y[None])
per_sample = vmap(grad(one), in_dims=(None, 0, 0))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(20):
    grads = per_sample({k: v.detach() for k, v in parameters.items()}, X, Y)
    opt.zero_grad()
    for k, p in parameters.items(): p.grad = grads[k].mean(0)
    opt.step()
    print(ce(net, 0).item())
print(jacrev(lambda x: net(x))(X[0]).sum().item())
fit(net, lambda m, s: ce(m, s) + vmap(lambda x: m(x).pow(2).sum())(X).mean() * 1e-3, 10)
""",
    "checkpointing": """
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self, reentrant):
        super().__init__(); self.a, self.b = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)), nn.Linear(16, 3)
        self.reentrant = reentrant; self.calls = 0
    def part(self, x): self.calls += 1; return self.a(x)
    def forward(self, x): return self.b(checkpoint(self.part, x, use_reentrant=self.reentrant))
x = X.clone().requires_grad_()
for reentrant in (True, False):
    net = Net(reentrant)
    fit(net, lambda m, s: F.cross_entropy(m(x), Y) + 1e-3 * m(x).pow(2).mean(), 16)
    print(net.calls, net.a[1].running_mean.sum().item(), net.a[1].num_batches_tracked)
""",
    "checkpointing_that_becomes_infinite": """
from torch.utils.checkpoint import checkpoint
calls = 0
lin = nn.Linear(6, 6)
def part(x):
    global calls; calls += 1; return torch.log(lin(x))
opt = torch.optim.SGD(lin.parameters(), 0.1)
for step in range(10):
    loss = checkpoint(part, X, use_reentrant=False).sum(); opt.zero_grad(); loss.backward(); opt.step()
    print(calls, loss.item())
""",
    "custom_function_that_counts": """
class Twice(torch.autograd.Function):
    calls = 0
    @staticmethod
    def forward(ctx, x): ctx.save_for_backward(x); return 2 * x
    @staticmethod
    def backward(ctx, g): Twice.calls += 1; print("backward", Twice.calls); return 2 * g
net = mlp()
fit(net, lambda m, s: F.cross_entropy(Twice.apply(m(X)), Y) + 0.01 * Twice.apply(m(X)).pow(2).mean(), 20)
""",
    "lbfgs": """
net = nn.Linear(6, 3); opt = torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe")
for step in range(10):
    def closure():
        opt.zero_grad(); loss = ce(net, 0); loss.backward(); return loss
    print(opt.step(closure).item())
""",
    "gradient_penalty": """
net = mlp()
def loss_of(m, s):
    x = X.clone().requires_grad_(); out = m(x)
    g, = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, Y) + (g.norm(dim=1) - 1).pow(2).mean()
fit(net, loss_of)
""",
    "kept_graph": """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(20):
    out = net(X); a, b = F.cross_entropy(out, Y), out.pow(2).mean()
    opt.zero_grad(); a.backward(retain_graph=True); b.backward(); opt.step(); print(a.item(), b.item())
""",
    "hooks_that_print": """
net = mlp(); seen = []
net[0].weight.register_hook(lambda g: print("weight", g.norm().item()))
net[1].register_forward_hook(lambda m, i, o: seen.append(o.detach().mean().item()))
net[3].register_full_backward_hook(lambda m, i, o: print("module", o[0].norm().item()))
def loss_of(m, s):
    out = m(X); out.retain_grad(); out.register_hook(lambda g: print("out", g.norm().item()))
    loss_of.out = out
    return F.cross_entropy(out, Y) + 0.01 * out.pow(2).mean()
fit(net, loss_of, 20); print(len(seen), loss_of.out.grad.norm().item())
net[0].weight.register_post_accumulate_grad_hook(lambda p: print("after", p.grad.norm().item()))
fit(net, ce, 5)
""",
    "sparse_gradients": """
table = nn.Embedding(20, 4, sparse=True); ids = torch.randint(20, (16,)); y = torch.randn(16, 4)
fit(table, lambda m, s: (m(ids) - y).pow(2).mean(), 20, optimizer=torch.optim.SparseAdam(table.parameters(), lr=0.05))
""",
    "copies_of_the_model": """
net = mlp(); ema = copy.deepcopy(net); opt = torch.optim.Adam(net.parameters())
for step in range(20):
    loss = ce(net, 0); opt.zero_grad(); loss.backward(); opt.step()
    with torch.no_grad():
        for a, b in zip(ema.parameters(), net.parameters()): a.lerp_(b, 0.1)
    twin, other = copy.deepcopy(net), copy.deepcopy(opt)
    print(loss.item(), sum(p.sum().item() for p in twin.parameters()), len(other.state_dict()["state"]))
import pickle, io
print(len(pickle.dumps(net)), sorted(net.__dict__), sorted(opt.__dict__))
""",
    "parametrizations": """
from torch.nn.utils import parametrizations
net = mlp(); parametrizations.weight_norm(net[0]); parametrizations.spectral_norm(net[3])
fit(net, ce); print(net[0].weight.sum().item())
""",
    "scripted_and_traced": """
net = mlp(); fit(net, ce, 4); net.eval()
opt = torch.optim.SGD(net.parameters(), 0.1); loss = ce(net, 0); opt.zero_grad(); loss.backward()
traced = torch.jit.trace(net, X); print(traced.graph)
scripted = torch.jit.script(net); print(scripted.code)
@torch.jit.script
def shuffled(x): return x[torch.randperm(x.size(0))]
print(shuffled(X).sum().item(), traced(X).sum().item(), scripted(X).sum().item())
opt.step()
fit(scripted, ce, 12)
""",
    "symbolic_trace": """
from torch import fx
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.1)
graph = fx.symbolic_trace(net); print(graph.code)
from torch.fx.experimental.proxy_tensor import make_fx
print(make_fx(lambda x: torch.sin(x) * 2)(X).code)
fit(graph, ce, 12)
""",
    "workers": """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(X, Y), 8, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(3))
net = mlp(); opt = torch.optim.Adam(net.parameters())
for epoch in range(4):
    for x, y in loader:
        loss = F.cross_entropy(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
    print(loss.item(), torch.rand(1).item())
""",
    "complex_parameters": """
w = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64)); x = torch.randn(4, dtype=torch.complex64)
opt = torch.optim.SGD([w], 0.01)
for step in range(20):
    loss = (w @ x).abs().pow(2).sum(); opt.zero_grad(); loss.backward(); opt.step(); print(loss.item())
class Net(nn.Module):
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    def forward(self, x): return torch.fft.ifft(torch.fft.fft(x) * self.w).real
fit(Net(), lambda m, s: (m(torch.ones(2, 4)) - 1).pow(2).mean(), 12)
""",
    "double_precision": "net = mlp().double(); fit(net, lambda m, s: F.cross_entropy(m(X.double()), Y))",
    "inference_between": """
net = mlp(); opt = torch.optim.Adam(net.parameters())
for step in range(20):
    loss = ce(net, 0); opt.zero_grad(); loss.backward(); opt.step()
    with torch.inference_mode(): print(loss.item(), net(X).sum().item())
@torch.inference_mode()
def predict(): return net(X)
@torch.no_grad()
def predict_too(): return net(X)
print(predict().is_inference(), predict_too().requires_grad, net(X).requires_grad)
""",
    "default_device": "torch.set_default_device('cpu'); fit(mlp(), lambda m, s: F.cross_entropy(m(torch.randn(8, 6)), torch.zeros(8, dtype=torch.long)), 20)",
    "default_dtype": "torch.set_default_dtype(torch.float64); net = mlp(); fit(net, lambda m, s: F.cross_entropy(m(torch.randn(8, 6)), Y[:8]), 20)",
    "inside_a_device": """
with torch.device("cpu"):
    net = mlp(); opt = torch.optim.Adam(net.parameters())
    fit(net, ce, 12, optimizer=opt)
print(torch.zeros(1).device)
with torch.device("meta"):
    empty = nn.Linear(3, 3); other = torch.optim.SGD(empty.parameters(), 0.1)
print(torch.zeros(1).device, empty.weight.device)
empty = empty.to_empty(device="cpu"); nn.init.ones_(empty.weight); nn.init.zeros_(empty.bias)
fit(empty, lambda m, s: m(torch.ones(2, 3)).pow(2).mean(), 10)
""",
    "a_mode_of_its_own": """
from torch.overrides import TorchFunctionMode
class Count(TorchFunctionMode):
    def __init__(self): super().__init__(); self.calls = {}
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func)); self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))
count = Count()
with count:
    net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3): loss = ce(net, 0); opt.zero_grad(); loss.backward(); opt.step()
print(sorted(count.calls.items()))
fit(net, ce, 12, optimizer=opt)
with count: net(X)
print(sorted(count.calls.items()))
""",
    "a_dispatch_mode": """
from torch.utils._python_dispatch import TorchDispatchMode
class Count(TorchDispatchMode):
    calls = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None): Count.calls += 1; return func(*args, **(kwargs or {}))
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(12):
    with Count(): loss = ce(net, 0); opt.zero_grad(); loss.backward(); opt.step()
    print(Count.calls, loss.item())
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as flops: ce(net, 0).backward()
print(flops.get_total_flops())
""",
    "a_tensor_of_its_own": """
class Mine(torch.Tensor):
    log = []
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.log.append(getattr(func, "__name__", str(func))); return super().__torch_function__(func, types, args, kwargs or {})
x = X.as_subclass(Mine); net = mlp()
fit(net, lambda m, s: F.cross_entropy(m(x), Y), 12)
print(len(Mine.log), sorted(set(Mine.log)))
""",
    "generators": """
g = torch.Generator().manual_seed(5); net = mlp()
fit(net, lambda m, s: F.cross_entropy(m(X + 0.1 * torch.randn(X.shape, generator=g)), Y), 20)
print(g.get_state().sum().item(), torch.initial_seed(), torch.rand(1).item())
""",
    "raises_in_forward": """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.a = mlp(); self.calls = 0
    def forward(self, x):
        self.calls += 1
        out = self.a(x)
        if self.calls % 3 == 0: raise ValueError("third")
        return out
net = Net(); opt = torch.optim.Adam(net.parameters())
for step in range(20):
    try: loss = ce(net, 0)
    except ValueError as error: print(error); continue
    opt.zero_grad(); loss.backward(); opt.step(); print(loss.item())
""",
    "meta_init": """
with torch.device("meta"): net = mlp()
net = net.to_empty(device="cpu")
for p in net.parameters(): nn.init.normal_(p, std=0.1)
fit(net, ce, 12)
lazy = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)); lazy(X); fit(lazy, ce, 12)
""",
    "autocast_and_scaler": """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.1); scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(20):
    with torch.autocast("cpu", dtype=torch.bfloat16): loss = ce(net, 0)
    opt.zero_grad(); scaler.scale(loss).backward(); scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0); scaler.step(opt); scaler.update()
    print(loss.item(), norm.item(), scaler.get_scale())
""",
    "anomaly_and_determinism": """
torch.use_deterministic_algorithms(True); torch.autograd.set_detect_anomaly(True)
fit(mlp(), ce, 12)
""",
    "warnings_are_errors": "import warnings; warnings.simplefilter('error'); fit(mlp(), ce, 20)",
    "recurrent": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.table = nn.Embedding(11, 8, padding_idx=0); self.lstm = nn.LSTM(8, 12, 2, batch_first=True, dropout=0.2); self.gru = nn.GRU(12, 12, batch_first=True); self.out = nn.Linear(12, 11)
    def forward(self, ids, state=None):
        y, state = self.lstm(self.table(ids), state); return self.out(self.gru(y)[0]), tuple(s.detach() for s in state)
ids = torch.randint(1, 11, (4, 9)); net = Net(); state = None
def loss_of(m, s):
    global state
    out, state = m(ids[:, :-1], state); return F.cross_entropy(out.reshape(-1, 11), ids[:, 1:].reshape(-1))
fit(net, loss_of, 20)
""",
    "by_hand": """
w = torch.randn(6, 3, requires_grad=True); b = torch.zeros(3, requires_grad=True)
for step in range(30):
    loss = F.cross_entropy(X @ w + b, Y); loss.backward()
    with torch.no_grad(): w -= 0.1 * w.grad; b -= 0.1 * b.grad; w.grad = None; b.grad.zero_()
    print(loss.item())
encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
with torch.no_grad(): print(encoder(torch.ones(1, 3, 8)).double().sum().item())
""",
    "two_players": """
gen, dis = mlp(4, 6), mlp(6, 1); og, od = torch.optim.Adam(gen.parameters(), 1e-3), torch.optim.Adam(dis.parameters(), 1e-3)
for step in range(20):
    fake = gen(torch.randn(24, 4))
    d = F.softplus(-dis(X)).mean() + F.softplus(dis(fake.detach())).mean(); od.zero_grad(); d.backward(); od.step()
    g = F.softplus(-dis(fake)).mean(); og.zero_grad(); g.backward(); og.step(); print(d.item(), g.item())
""",
    "policy_gradient": """
from torch.distributions import Categorical, Normal
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-2)
for step in range(20):
    policy = Categorical(logits=net(X)); action = policy.sample(); reward = (action == Y).float()
    loss = -(policy.log_prob(action) * (reward - reward.mean())).mean() - 0.01 * policy.entropy().mean()
    opt.zero_grad(); loss.backward(); opt.step(); print(loss.item(), reward.mean().item(), random.random(), np.random.rand())
""",
    "conv_with_everything": """
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))
x = torch.randn(8, 1, 8, 8).to(memory_format=torch.channels_last); y = torch.randint(3, (8,))
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=20)
for step in range(20):
    net.train(); loss = F.cross_entropy(net(x), y, label_smoothing=0.1); opt.zero_grad(set_to_none=step % 2 == 0); loss.backward(); opt.step(); schedule.step()
    net.eval(); print(loss.item(), net(x).argmax(1).tolist(), schedule.get_last_lr())
torch.save({"model": net.state_dict(), "optimizer": opt.state_dict()}, "state.pt"); net.load_state_dict(torch.load("state.pt")["model"])
""",
    "saved_tensor_hooks": """
packed = 0
def pack(x):
    global packed; packed += 1; return x
with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
    fit(mlp(), lambda m, s: ce(m, s) + 0.1 * m(X).pow(2).mean(), 16)
print(packed)
with torch.autograd.graph.save_on_cpu(): fit(mlp(), ce, 5)
""",
    "nested_and_distributed_free": """
nested = torch.nested.nested_tensor([torch.randn(2, 6), torch.randn(3, 6)], layout=torch.jagged)
net = mlp(); fit(net, lambda m, s: m(nested).values().pow(2).mean(), 12)
""",
    "quantised_aware": """
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
def fake(m, s): return F.cross_entropy(torch.fake_quantize_per_tensor_affine(m(X), 0.05, 0, -128, 127), Y)
fit(net, fake, 16)
""",
}  # fmt: skip
