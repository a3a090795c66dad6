"""Names by which Ray knows what is ours."""

APPLICATION = "forerun"
DEPLOYMENT = "Forerun"
ROUTER = "forerun.serve.replicas.router:BeginningsRouter"
MIDDLEWARES = "forerun.serve.replicas.proxy:middlewares"
