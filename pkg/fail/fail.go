// Package fail defines the one error type that crosses package boundaries. Its stable code
// becomes the exit status, and its hint is a command to run.
//
// It never prints and never exits; package cli does both.
package fail

import (
	"errors"
	"fmt"
)

// Code classifies an error. Its number is the process's exit status and part of the
// product's interface (docs/architecture.md, "Exit codes").
type Code int

// The codes. Timeout follows timeout(1), and Interrupted follows the shell's 128+SIGINT.
const (
	Failure     Code = 1   // any error that no other code describes
	Usage       Code = 2   // the command line or a settings file is wrong
	NotFound    Code = 3   // no such session, repository, image, file
	Conflict    Code = 4   // already exists, is in use, would lose work, or exceeds a limit
	Host        Code = 5   // the host lacks something: QEMU, tmux, disk space
	Secret      Code = 6   // a secret or a login is missing or refused
	Policy      Code = 7   // the network policy denies it
	Preserved   Code = 8   // a task failed and its VM was kept
	Timeout     Code = 124 // a deadline expired
	Interrupted Code = 130 // the user interrupted
)

// String returns the code's stable name, used in --json output and in the store.
func (c Code) String() string {
	switch c {
	case Usage:
		return "USAGE"
	case NotFound:
		return "NOT_FOUND"
	case Conflict:
		return "CONFLICT"
	case Host:
		return "HOST"
	case Secret:
		return "SECRET"
	case Policy:
		return "POLICY"
	case Preserved:
		return "PRESERVED"
	case Timeout:
		return "TIMEOUT"
	case Interrupted:
		return "INTERRUPTED"
	default:
		return "FAILURE"
	}
}

// Error is an error with a code and, if a fix is known, a hint.
type Error struct {
	Code Code
	Hint string // a command to run, or "" when none is known
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// New returns an error with the given code; format and args are those of fmt.Errorf.
func New(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Err: fmt.Errorf(format, args...)}
}

// WithHint sets the hint and returns e.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

// CodeOf returns the code of the first Error in err's chain, or Failure if there is none.
func CodeOf(err error) Code {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return Failure
}

// HintOf returns the first hint in err's tree, searched depth first. For joined errors, it
// is the hint of the first error that has one.
func HintOf(err error) string {
	if e, ok := err.(*Error); ok && e.Hint != "" { //nolint:errorlint // the walk checks each error separately
		return e.Hint
	}
	switch e := err.(type) { //nolint:errorlint // as above
	case interface{ Unwrap() error }:
		return HintOf(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			if hint := HintOf(err); hint != "" {
				return hint
			}
		}
	}
	return ""
}

// ParseCode returns the code whose String is name, and Failure for any other name.
func ParseCode(name string) Code {
	for _, c := range []Code{Usage, NotFound, Conflict, Host, Secret, Policy, Preserved, Timeout, Interrupted} {
		if c.String() == name {
			return c
		}
	}
	return Failure
}
