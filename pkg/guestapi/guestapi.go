// Package guestapi serves the requests of one session's guest about its subtasks. They arrive
// over the session's SSH connection; nothing listens on a network.
//
// The guest is hostile: the package identifies it by the session's token, and bounds its
// connections, its requests and their sizes. What a request may do is decided by the operations
// of package ops.
package guestapi

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/mcpserver"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

const (
	maxConns    = 8         // at once
	maxManifest = 256 << 10 // bytes
	maxWait     = time.Minute
	maxBody     = 30 * time.Second
	maxConn     = time.Hour       // how long a connection may last
	maxSend     = 5 * time.Minute // how long a file may take

	perSecond = 2 // requests, over all connections
	atOnce    = 60

	fetchEvery    = 4 * time.Minute // on average
	fetchesAtOnce = 15              // so at most 30 in an hour
)

// Server serves the guest of one session. The limit of its requests outlives connections.
type Server struct {
	Session string
	Version string
	Log     *slog.Logger
	// Engine returns what performs operations, with the settings as they are now.
	Engine func(context.Context) (ops.Engine, error)
	// Fetch fetches the commits of the guest to the host.
	Fetch func(context.Context) error

	limit, fetches    *rate.Limiter
	limited           sync.Once
	fetching, packing sync.Mutex // held while the host fetches commits, or sends some
}

func (s *Server) limiter() *rate.Limiter {
	s.limited.Do(func() {
		s.limit, s.fetches = rate.NewLimiter(perSecond, atOnce), rate.NewLimiter(rate.Every(fetchEvery), fetchesAtOnce)
	})
	return s.limit
}

// Serve serves the connections of l until ctx ends or l fails. It closes l and all connections.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	b := &bridge{Listener: l, slots: make(chan struct{}, maxConns)}
	h := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 8 << 10,
		ErrorLog: slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug), BaseContext: func(net.Listener) context.Context { return ctx },
	}
	h.SetKeepAlivesEnabled(false)
	stop := context.AfterFunc(ctx, func() { _ = h.Close() })
	defer stop()
	err := h.Serve(b)
	_ = h.Close() // ends the connections
	b.wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, f func(w http.ResponseWriter, r *http.Request, e ops.Engine) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			e, err := s.admit(r)
			if err == nil {
				err = f(w, r, e)
			}
			if err != nil {
				s.writeError(w, err)
			}
		})
	}
	handle("POST /tasks", s.submit)
	handle("GET /tasks", func(w http.ResponseWriter, r *http.Request, e ops.Engine) error {
		return answer(w)(ops.ListTasks.On(r.Context(), e, ops.TaskQuery{Limit: 100}))
	})
	handle("GET /tasks/{id}", wait)
	handle("DELETE /tasks/{id}", func(w http.ResponseWriter, r *http.Request, e ops.Engine) error {
		return answer(w)(ops.CancelTask.On(r.Context(), e, at(r)))
	})
	handle("GET /tasks/{id}/artifacts", func(w http.ResponseWriter, r *http.Request, e ops.Engine) error {
		return answer(w)(ops.ListArtifacts.On(r.Context(), e, at(r)))
	})
	handle("GET /tasks/{id}/artifacts/{name...}", func(w http.ResponseWriter, r *http.Request, e ops.Engine) error {
		f, err := e.Read(r.Context(), ops.File{Task: r.PathValue("id"), Artifact: r.PathValue("name")})
		if err != nil {
			return err
		}
		return sendFile(w, f)
	})
	handle("GET /tasks/{id}/commits", func(w http.ResponseWriter, r *http.Request, e ops.Engine) error {
		if !s.packing.TryLock() {
			return fail.New(fail.Conflict, "other commits are being sent").WithHint("agent-guest task fetch ID, later")
		}
		defer s.packing.Unlock()
		ctx, cancel := context.WithTimeout(r.Context(), maxSend)
		defer cancel()
		f, err := e.Commits(ctx, r.PathValue("id"))
		if err != nil {
			return err
		}
		return sendFile(w, f)
	})
	handle("GET /mcp", s.mcp)
	return mux
}

// errToken means that a request has no valid token. It is returned wrapped.
var errToken = errors.New("the session's token is missing or wrong")

// admit refuses what is not from the session's guest, and what exceeds the limit of requests.
// Wrong tokens count, too.
func (s *Server) admit(r *http.Request) (e ops.Engine, err error) {
	if err := s.take(); err != nil {
		return e, err
	}
	return s.engine(r.Context(), r.Header.Get("Authorization"))
}

// engine returns what performs the guest's operations, with the settings as they are now. It
// refuses a wrong token.
func (s *Server) engine(ctx context.Context, authorization string) (e ops.Engine, err error) {
	if e, err = s.Engine(ctx); err != nil {
		return e, err
	}
	row, err := e.Tasks.Sessions.Get(ctx, s.Session)
	if err != nil {
		return e, err
	}
	token, _ := strings.CutPrefix(authorization, "Bearer ")
	sum := sha256.Sum256([]byte(token))
	if subtle.ConstantTimeCompare([]byte(hex.EncodeToString(sum[:])), []byte(row.TokenSHA256)) != 1 {
		return e, fail.New(fail.Policy, "%w", errToken).WithHint("run agent-guest as the user whose session this is")
	}
	e.Fetch = s.fetch // a manifest can name a commit that only the guest has
	return e.As(ops.Guest(s.Session)), nil
}

// errRate means that there were too many requests. It is returned wrapped.
var errRate = errors.New("too many requests from this VM")

func (s *Server) take() error {
	if !s.limiter().Allow() {
		return fail.New(fail.Conflict, "%w", errRate).WithHint("try again in some seconds")
	}
	return nil
}

func (s *Server) submit(w http.ResponseWriter, r *http.Request, e ops.Engine) error {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(maxBody))
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxManifest))
	if err != nil {
		return fail.New(fail.Usage, "read the manifest: %w", err).WithHint("put long texts into a file of the repository")
	}
	_ = control.SetReadDeadline(time.Time{})
	key := r.Header.Get("Idempotency-Key")
	if len(key) > 255 {
		return fail.New(fail.Usage, "Idempotency-Key must have at most 255 characters").WithHint("agent-guest task submit")
	}
	return answer(w)(ops.SubmitTask.On(r.Context(), e, ops.SubmitRequest{
		Once: ops.Once{Key: key}, Name: "manifest", ContentType: "application/yaml", RawBody: body,
	}))
}

// fetch fetches the commits of the guest to the host: once at a time, and not too often.
func (s *Server) fetch(ctx context.Context) error {
	if !s.fetching.TryLock() {
		return fail.New(fail.Conflict, "another fetch is running").WithHint("submit it again, later")
	}
	defer s.fetching.Unlock()
	if !s.fetches.Allow() {
		return fail.New(fail.Conflict, "commits were fetched too often").WithHint("submit it again in %v, or leave repository.commit out", fetchEvery)
	}
	return s.Fetch(ctx)
}

// wait answers with a subtask as soon as it has ended, or after the time that the request names.
func wait(w http.ResponseWriter, r *http.Request, e ops.Engine) error {
	seconds, _ := strconv.Atoi(r.URL.Query().Get("wait"))
	return answer(w)(mcpserver.AwaitTask(r.Context(), e, at(r), min(time.Duration(max(seconds, 0))*time.Second, maxWait)))
}

func at(r *http.Request) ops.TaskPath { return ops.TaskPath{ID: r.PathValue("id")} }

// answer returns a function that writes a result as JSON, or returns the error.
func answer(w http.ResponseWriter) func(any, error) error {
	return func(result any, err error) error {
		if err != nil {
			return err
		}
		text, err := json.Marshal(result)
		if err != nil {
			return err
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(text)))
		_, _ = w.Write(text) // the guest may be gone
		return nil
	}
}

// Problem is the answer to a request that failed.
type Problem struct {
	Code  string `json:"code"`
	Error string `json:"error"`
	Hint  string `json:"hint,omitempty"`
}

// public returns an error as the guest may read it, and logs what that hides.
func (s *Server) public(err error) error {
	switch code := fail.CodeOf(err); code {
	case fail.Usage, fail.Policy, fail.Conflict, fail.NotFound:
		return fail.New(code, "%s", task.HidePaths(err.Error())).WithHint("%s", task.HidePaths(fail.HintOf(err)))
	default:
		s.Log.Warn("request of the guest failed", "error", err, "hint", fail.HintOf(err))
		return fail.New(code, task.Hidden)
	}
}

func (s *Server) writeError(w http.ResponseWriter, err error) {
	status := map[fail.Code]int{
		fail.Usage: http.StatusBadRequest, fail.NotFound: http.StatusNotFound, fail.Conflict: http.StatusConflict, fail.Policy: http.StatusForbidden,
	}[fail.CodeOf(err)]
	switch {
	case errors.Is(err, errToken):
		status = http.StatusUnauthorized
	case errors.Is(err, errRate):
		status = http.StatusTooManyRequests
	case status == 0:
		status = http.StatusInternalServerError
	}
	err = s.public(err)
	text, _ := json.Marshal(Problem{fail.CodeOf(err).String(), err.Error(), fail.HintOf(err)}) // strings can always be encoded
	w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	w.WriteHeader(status)
	_, _ = w.Write(text)
}

// sendFile sends a file with its length, so that the guest notices when the rest is missing. It
// ends after maxSend.
func sendFile(w http.ResponseWriter, f io.ReadCloser) error {
	defer f.Close()
	file, ok := f.(interface {
		io.ReadSeeker
	})
	if !ok {
		return errors.New("the file has no size")
	}
	size, err := file.Seek(0, io.SeekEnd)
	if err == nil {
		_, err = file.Seek(0, io.SeekStart)
	}
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(maxSend))
	_, _ = io.CopyN(w, file, size)
	return nil
}

// bridge puts a pipe between each connection and its server, because channels of SSH have no
// deadlines. It limits the connections.
type bridge struct {
	net.Listener
	slots chan struct{}
	conns sync.WaitGroup
}

// Accept implements net.Listener. It always accepts, because the SSH connection is
// blocked until it does. It closes what exceeds the slots.
func (b *bridge) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case b.slots <- struct{}{}:
			return b.serve(c), nil
		default:
			_ = c.Close()
		}
	}
}

// serve returns the server's end of a connection.
func (b *bridge) serve(c net.Conn) net.Conn {
	near, far := net.Pipe()
	end := time.AfterFunc(maxConn, func() { _ = c.Close(); _ = far.Close() })
	b.conns.Go(func() {
		defer func() { <-b.slots }()
		defer end.Stop()
		var up sync.WaitGroup
		up.Go(func() {
			_, _ = io.Copy(far, c)
			_ = far.Close()
		})
		_ = pipe.Copy(c, far)
		_ = c.Close()
		up.Wait()
	})
	return near
}

func (b *bridge) wait() { b.conns.Wait() }
