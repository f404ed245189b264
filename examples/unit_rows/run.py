import torch
from unit_rows import op

x = torch.arange(1.0, 2049.0).reshape(2, 1024)
y, s = op(x)
print(s)
