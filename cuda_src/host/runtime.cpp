// The host runtime as one translation unit: g++ -O2 -std=c++17 -shared -fPIC -I cuda_src runtime.cpp -lpthread
#include "host/fiber.cpp"
#include "host/scheduler.cpp"
#include "host/barrier.cpp"
#include "host/warp.cpp"
#include "host/copy_async.cpp"
#include "host/grid.cpp"
#include "host/launch.cpp"
#include "host/checker.cpp"
