"""gpytorch#2631: a hook of the cached mean's graph pins the model (1.15.2; pull request 2734 is not released)."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, inputs, targets):
        super().__init__(inputs, targets, gpytorch.likelihoods.GaussianLikelihood())
        self.mean, self.kernel = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()

    def forward(self, inputs):
        return gpytorch.distributions.MultivariateNormal(self.mean(inputs), self.kernel(inputs))


def test_predict():
    model = Model(torch.rand(100, 10), torch.rand(100)).eval()
    with gpytorch.settings.detach_test_caches(False):
        model(torch.rand(20, 10))
