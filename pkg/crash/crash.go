//go:build !fakevm

// Package crash marks the lines between which a process may end without a loss. A
// test ends it there, or stops it for a while, in the builds with fake VMs; in the
// program that is shipped a mark does nothing.
package crash

// Here is a mark. Those of one name are counted.
func Here(Mark) {}
