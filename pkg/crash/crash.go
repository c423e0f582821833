//go:build !fakevm

// Package crash marks the points between which a process may die without losing data. In
// builds with fake VMs, a test can kill or stop the process at a mark. In the shipped
// program a mark does nothing.
package crash

// Here is a mark that does nothing in this build.
func Here(Mark) {}
