import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_iris
from sklearn.model_selection import train_test_split

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 3
torch.manual_seed(seed)

iris = load_iris()
X = (iris.data - iris.data.mean(axis=0)) / iris.data.std(axis=0)
X_train, X_test, y_train, y_test = train_test_split(X, iris.target, test_size=0.3, random_state=seed)
X_train = torch.FloatTensor(X_train)
X_test = torch.FloatTensor(X_test)
y_train = torch.LongTensor(y_train)
y_test = torch.LongTensor(y_test)


class IrisNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 50)
        self.fc2 = nn.Linear(50, 50)
        self.fc3 = nn.Linear(50, 3)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


model = IrisNet()
loss_fn = nn.NLLLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

for epoch in range(150):
    y_pred = model(X_train)
    loss = loss_fn(y_pred, y_train)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 15 == 0:
        with torch.no_grad():
            correct = (model(X_test).argmax(dim=1) == y_test).type(torch.FloatTensor)
        print(f"epoch {epoch:3d}  loss {loss.item():12.4f}  accuracy {correct.mean().item():.3f}")
