//go:build !fakevm

// Package crash marks the points between which a process may die without losing data. In
// builds with fake VMs, a test can kill or stop the process at a mark. In the shipped
// program a mark does nothing.
package crash

// Here marks a point of the program. In this build it does nothing.
func Here(Mark) {}
