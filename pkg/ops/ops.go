// Package ops is the list of what can be asked of a host: typed operations, each with the
// scope it needs, its rules, and its place in the HTTP API.
//
// Commands and routes are tables over these operations and add nothing but their form. An
// Engine performs an operation on this host; package client sends the same operation to the
// API of another host. Both are a Host, so a command works on either.
package ops

import (
	"context"
	"errors"
	"io"
	"iter"
	"net/http"
	"slices"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Host performs operations.
type Host interface {
	// Perform performs one operation.
	Perform(ctx context.Context, c Call) error
	// Events yields the events of a subject after the given sequence, which may be
	// store.Oldest. If follow is set, it then waits for new ones until ctx ends.
	Events(ctx context.Context, of Subject, after int64, follow bool) iter.Seq2[store.Event, error]
	// Read opens a file of a task, or a recording.
	Read(ctx context.Context, f File) (io.ReadCloser, error)
	// Dial logs in to the guest of a running session. If shared is set, the connection may be
	// that of the session's keeper, which is faster, but ends with the keeper.
	Dial(ctx context.Context, session string, shared bool) (*ssh.Client, error)
}

// Subject is a session or a task, as one that has events.
type Subject struct{ collection, ID string }

// Session returns the session with that id as a subject.
func Session(id string) Subject { return Subject{SessionsPath, id} }

// Task returns the task with that id as a subject.
func Task(id string) Subject { return Subject{TasksPath, id} }

// Path returns the subject's path in the API.
func (s Subject) Path() string { return s.collection + "/" + s.ID }

// Spec describes an operation. Adapters derive routes and documents from it.
type Spec struct {
	ID      string // the operationId in the OpenAPI document
	Method  string
	Path    string // parameters are in braces; the request has a field with the tag `path` for each
	Tag     string // the group in the OpenAPI document
	Summary string
	About   string // further description; may be ""
	Need    Scope
	Status  int      // of success; 200 if 0
	Errors  []int    // statuses of errors in addition to those that every operation may return
	Accepts []string // content types of a RawBody; a Body is JSON
	Guest   bool     // a session's guest may ask for it, about its subtasks
}

// Operation is something that can be asked of a host. The fields of a request have the tags
// of the HTTP API: path, query and header. Its field Body, or RawBody, is the body.
type Operation[Request, Result any] struct {
	Spec
	do func(context.Context, *Engine, *Request) (Result, error)
}

// Call is a request for an operation.
type Call struct {
	Spec
	Request any // a pointer to the operation's request
	Result  any // a pointer to its result
	do      func(context.Context, *Engine) error
}

// On performs the operation on h.
func (o Operation[Request, Result]) On(ctx context.Context, h Host, r Request) (Result, error) {
	var result Result
	err := h.Perform(ctx, Call{Spec: o.Spec, Request: &r, Result: &result, do: func(ctx context.Context, e *Engine) (err error) {
		result, err = o.do(ctx, e, &r)
		return err
	}})
	return result, err
}

// Scope is what a caller may do. Each scope includes the previous ones.
type Scope string

// The scopes.
const (
	Read   Scope = "read"   // read everything
	Submit Scope = "submit" // submit what the caller's Permission allows; cancel, retry and destroy what it submitted
	Admin  Scope = "admin"  // everything that the host's user may do
)

// Scopes returns all scopes, the least powerful first.
func Scopes() []Scope { return []Scope{Read, Submit, Admin} }

// Allows reports whether s includes need.
func (s Scope) Allows(need Scope) bool {
	return slices.Index(Scopes(), s) >= slices.Index(Scopes(), need) && slices.Contains(Scopes(), s)
}

// Caller is the person or program that asks for an operation.
type Caller struct {
	Name       string // for the audit log: "user:me", "token:ci"
	Scope      Scope
	Permission *task.Permission // what the caller may submit; nil for everything
	Session    string           // id of the session whose guest asks; "" for others
	Peer       bool             // another host of the cluster asks
}

// Guest returns the caller for what comes from a session's guest.
func Guest(session string) Caller {
	return Caller{Name: "session:" + session, Scope: Submit, Session: session}
}

// Check returns an error if the caller may not ask for the operation.
func (c Caller) Check(s Spec) error {
	if c.Session != "" && !s.Guest {
		return marked{fail.New(fail.Policy, "%s is not for guests", s.ID).WithHint("agent-guest task"), ErrScope}
	}
	if err := c.checkPeer(s); err != nil {
		return err
	}
	if s.Need == "" || c.Scope.Allows(s.Need) {
		return nil
	}
	return marked{fail.New(fail.Policy, "%s needs the scope %s, but the token has %s", s.ID, s.Need, c.Scope).
		WithHint("use a token with the scope %s", s.Need), ErrScope}
}

// Errors that adapters report in their own way. They are returned wrapped.
var (
	ErrScope   = errors.New("scope")           // the caller's scope does not include the operation
	ErrBusy    = errors.New("busy")            // the operation may be repeated later
	ErrContent = errors.New("invalid content") // the request names something that does not exist, such as a profile in a manifest
)

// marked is an error that is also one of the errors above, without its text.
type marked struct {
	error
	mark error
}

// Unwrap returns the error, with its code and hint, and the mark.
func (m marked) Unwrap() []error { return []error{m.error, m.mark} }

// Paths below which the API has its resources.
const (
	TasksPath    = "/api/v1/tasks"
	SessionsPath = "/api/v1/sessions"
)

// Tunnel is the part of the API that Host.Dial uses after LoginSession: a WebSocket that carries
// an SSH connection to a guest.
var Tunnel = Spec{
	ID: "tunnelSession", Method: http.MethodGet, Path: "/ws/sessions/{id}/ssh", Tag: "sessions", Need: Admin,
	Status: http.StatusSwitchingProtocols, Errors: []int{404, 405, 409, 426},
	Summary: "Connect to the SSH port of a session's guest over WebSocket",
	About: "The binary messages carry the bytes of the connection, which the server cannot read: the client logs in to the guest itself, with " +
		"the certificate of loginSession. An end that reads nothing for 2 minutes is disconnected.",
}

// SeeDocs is the hint of an error whose cause only the API's description explains.
const SeeDocs = "GET /openapi.json describes the routes and their parameters"
