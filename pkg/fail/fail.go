// Package fail is the one error type that crosses package borders: a stable
// code that becomes the exit status, and a hint that is a command to run.
//
// It never prints and never exits; that is the command line's business.
package fail

import (
	"errors"
	"fmt"
)

// Code classifies an error; its number is the process's exit status and is
// part of the product's interface (docs/architecture.md, "Exit codes").
type Code int

// The codes. 124 and 130 follow timeout(1) and the shell's 128+SIGINT.
const (
	Failure     Code = 1   // something went wrong that no other code names
	Usage       Code = 2   // the command line or a configuration file is wrong
	NotFound    Code = 3   // no such session, repository, image, file
	Conflict    Code = 4   // exists already, is in use, would lose work, over a limit
	Host        Code = 5   // the host lacks something: QEMU, tmux, disk space
	Secret      Code = 6   // a secret or a login is missing or refused
	Policy      Code = 7   // network policy does not allow it
	Preserved   Code = 8   // a task failed and its VM was kept
	Timeout     Code = 124 // a deadline passed
	Interrupted Code = 130 // the user interrupted
)

// String is the code's stable name, used in --json output and in the store.
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

// Error is an error with a code and, where the cause is known, a hint.
type Error struct {
	Code Code
	Hint string // a command to run, or "" when none is known
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// New makes an error with a code; format and args are those of fmt.Errorf.
func New(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Err: fmt.Errorf(format, args...)}
}

// WithHint sets the hint and returns e.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

// CodeOf is the code of the first Error in err's chain, Failure when there is none.
func CodeOf(err error) Code {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return Failure
}

// HintOf is the first hint in err's tree, depth first: of joined errors, the
// hint of the first that has one.
func HintOf(err error) string {
	if e, ok := err.(*Error); ok && e.Hint != "" { //nolint:errorlint // the walk looks at each error by itself
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

// ParseCode reads what String wrote; anything else is Failure.
func ParseCode(name string) Code {
	for _, c := range []Code{Usage, NotFound, Conflict, Host, Secret, Policy, Preserved, Timeout, Interrupted} {
		if c.String() == name {
			return c
		}
	}
	return Failure
}
