// The few CPython functions the launcher uses, all of the stable ABI, found in the running process; and how a Python
// exception crosses torch's C++ dispatcher.
#pragma once
#include <sys/types.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

extern "C" {
struct _object;
typedef _object PyObject;
int PyGILState_Ensure();
void PyGILState_Release(int);
PyObject* PyBytes_FromStringAndSize(const char*, ssize_t);
int PyBytes_AsStringAndSize(PyObject*, char**, ssize_t*);
PyObject* PyLong_FromLong(long);
PyObject* PyUnicode_FromString(const char*);
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
PyObject* PyObject_Str(PyObject*);
const char* PyUnicode_AsUTF8AndSize(PyObject*, ssize_t*);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
void PyErr_Fetch(PyObject**, PyObject**, PyObject**);
void PyErr_Restore(PyObject*, PyObject*, PyObject*);
void PyErr_NormalizeException(PyObject**, PyObject**, PyObject**);
void PyErr_Clear();
}

struct Gil {
  int state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

struct PyRef {
  PyObject* p;
  explicit PyRef(PyObject* o) : p(o) {}
  PyRef(const PyRef&) = delete;
  ~PyRef() { Py_DecRef(p); }
};

// pybind11 translates any exception derived from this class by calling set_error(). The name and layout (a
// runtime_error with one virtual) are those of pybind11 2.x and 3.x; libstdc++ matches types across libraries by name.
namespace pybind11 {
class __attribute__((visibility("default"))) builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual void set_error() const = 0;
};
}  // namespace pybind11

struct PyExc {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  ~PyExc() {
    Gil gil;
    Py_DecRef(type);
    Py_DecRef(value);
    Py_DecRef(trace);
  }
};

class PythonError final : public pybind11::builtin_exception {
  std::shared_ptr<PyExc> error_;

 public:
  PythonError(std::shared_ptr<PyExc> e, const std::string& message)
      : builtin_exception(message), error_(std::move(e)) {}
  void set_error() const override {
    Py_IncRef(error_->type);
    Py_IncRef(error_->value);
    Py_IncRef(error_->trace);
    PyErr_Restore(error_->type, error_->value, error_->trace);
  }
};

// Throws the Python error that is set; the GIL is held.
[[noreturn]] inline void throw_python() {
  auto e = std::make_shared<PyExc>();
  PyErr_Fetch(&e->type, &e->value, &e->trace);
  PyErr_NormalizeException(&e->type, &e->value, &e->trace);
  std::string message = "error in Python";
  if (PyObject* s = PyObject_Str(e->value)) {
    ssize_t n;
    if (const char* c = PyUnicode_AsUTF8AndSize(s, &n)) message.assign(c, static_cast<size_t>(n));
    Py_DecRef(s);
  }
  PyErr_Clear();
  throw PythonError(std::move(e), message);
}
