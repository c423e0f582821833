package guestapi

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"golang.org/x/time/rate"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// mcpConn is a guest's connection for MCP.
type mcpConn struct {
	net.Conn
	lines *bufio.Reader
}

// connectMCP serves s, and returns a connection that is initialized.
func connectMCP(t *testing.T, s *Server) mcpConn {
	t.Helper()
	path := filepath.Join(testenv.ShortDir(t), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	fmt.Fprintf(c, "GET /mcp HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: mcp\r\nAuthorization: Bearer %sa\r\n\r\n", token)
	m := mcpConn{c, bufio.NewReader(c)}
	r, err := http.ReadResponse(m.lines, nil)
	if err != nil || r.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("GET /mcp = %v, %v, want 101", r, err)
	}
	if answer := m.ask(t, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"a","version":"1"}}}`); !strings.Contains(answer, "agent-guest") {
		t.Fatalf("initialize = %s", answer)
	}
	fmt.Fprintln(m, `{"jsonrpc":"2.0","method":"notifications/initialized"}`)
	return m
}

// ask sends a message and returns the next one.
func (m mcpConn) ask(t *testing.T, message string) string {
	t.Helper()
	fmt.Fprintln(m, message)
	answer, err := m.lines.ReadString('\n')
	if err != nil {
		t.Fatalf("answer to %.60s: %v", message, err)
	}
	return answer
}

// TestUnansweredCallsAreFew checks that a guest cannot make the host hold many calls.
func TestUnansweredCallsAreFew(t *testing.T) {
	s, _ := newServer(t)
	var v struct{ ID string }
	if err := json.Unmarshal(request(s, token+"a", "POST", "/tasks", manifest).Body.Bytes(), &v); err != nil {
		t.Fatal(err)
	}
	m := connectMCP(t, s)
	_ = m.SetWriteDeadline(time.Now().Add(2 * time.Second))
	sent := 0
	for i := range 40 {
		n, err := fmt.Fprintf(m, `{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"watch_task","arguments":{"task":%q,"seconds":60},"_meta":{"a":%q}}}`+"\n",
			i+2, v.ID, strings.Repeat("x", 200<<10))
		if sent += n; err != nil {
			break
		}
	}
	if most := 3 << 20; sent > most {
		t.Errorf("the host took %d bytes of calls that it did not answer, want at most %d", sent, most)
	}
}

func TestCallsWaitForAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host, guest := net.Pipe()
		m := newMessages(host, host, rate.NewLimiter(rate.Inf, 1))
		go func() {
			for i := range maxCalls {
				fmt.Fprintf(guest, `{"jsonrpc":"2.0","id":%d,"method":"ping"}`+"\n", i)
			}
			fmt.Fprintln(guest, `{"jsonrpc":"2.0","method":"notifications/cancelled"}`)
			fmt.Fprintln(guest, `{"jsonrpc":"2.0","id":"last","method":"ping"}`)
		}()
		var first *jsonrpc.Request
		for range maxCalls + 1 { // a notification waits for nothing
			msg, err := m.Read(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if first == nil {
				first = msg.(*jsonrpc.Request)
			}
		}
		read := make(chan error, 1)
		go func() {
			_, err := m.Read(t.Context())
			read <- err
		}()
		synctest.Wait()
		if len(read) > 0 {
			t.Fatalf("call %d was passed on, want it to wait for an answer", maxCalls+1)
		}
		go func() { _, _ = bufio.NewReader(guest).ReadString('\n') }()
		if err := m.Write(t.Context(), &jsonrpc.Response{ID: first.ID, Result: json.RawMessage("{}")}); err != nil {
			t.Fatal(err)
		}
		if err := <-read; err != nil {
			t.Errorf("call %d after an answer = %v", maxCalls+1, err)
		}
		// The end of the connection ends what waits.
		go func() { _, _ = fmt.Fprintln(guest, `{"jsonrpc":"2.0","id":9,"method":"ping"}`) }()
		go func() {
			_, err := m.Read(t.Context())
			read <- err
		}()
		synctest.Wait()
		_ = m.Close()
		if err := <-read; err == nil {
			t.Error("Read of a closed connection = nil, want an error")
		}
	})
}

func TestNotificationsAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host, guest := net.Pipe()
		m := newMessages(host, host, rate.NewLimiter(perSecond, 1))
		go func() {
			for range 5 {
				fmt.Fprintln(guest, `{"jsonrpc":"2.0","method":"notifications/initialized"}`)
			}
		}()
		start := time.Now()
		for range 5 {
			if _, err := m.Read(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(start); took < 2*time.Second {
			t.Errorf("5 notifications took %v, want at least 2s", took)
		}
	})
}

// TestUnreadAnswersEndTheConnection checks that a guest that does not read loses the connection.
func TestUnreadAnswersEndTheConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host, guest := net.Pipe()
		defer guest.Close()
		m := newMessages(host, host, rate.NewLimiter(rate.Inf, 1))
		start := time.Now()
		err := m.Write(t.Context(), &jsonrpc.Response{Result: json.RawMessage("{}")})
		if took := time.Since(start); !errors.Is(err, os.ErrDeadlineExceeded) || took != maxWrite || m.done.Err() == nil {
			t.Errorf("Write = %v after %v, closed: %v, want the deadline after %v", err, took, m.done.Err() != nil, maxWrite)
		}
	})
}

func TestBadMessagesEndTheConnection(t *testing.T) {
	for name, line := range map[string]string{
		"a batch":        `[{"jsonrpc":"2.0","id":1,"method":"ping"}]`,
		"a spaced batch": ` [{"jsonrpc":"2.0","id":1,"method":"ping"}]`,
		"a long message": `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":"` + strings.Repeat("x", maxMessage) + `"}}`,
		"not JSON":       "GET / HTTP/1.1",
	} {
		m := newMessages(nil, strings.NewReader(line+"\n"), rate.NewLimiter(rate.Inf, 1))
		if msg, err := m.Read(t.Context()); err == nil {
			t.Errorf("%s = %v, want an error", name, msg)
		}
	}
}

// TestEachCallIsChecked checks that a connection does not outlive the token and the settings
// with which it began.
func TestEachCallIsChecked(t *testing.T) {
	s, tasks := newServer(t)
	var engines atomic.Int32
	engine := s.Engine
	s.Engine = func(ctx context.Context) (ops.Engine, error) {
		engines.Add(1)
		return engine(ctx)
	}
	m := connectMCP(t, s)
	list := `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"list_tasks","arguments":{}}}`
	if answer := m.ask(t, list); strings.Contains(answer, "error") {
		t.Errorf("a call = %s, want a list", answer)
	}
	before := engines.Load()
	m.ask(t, list)
	if n := engines.Load() - before; n != 1 {
		t.Errorf("a call took the engine %d times, want once", n)
	}
	if _, err := tasks.Sessions.Store.Update(t.Context(), mine, func(row *store.Session) (store.Event, error) {
		row.TokenSHA256 = ""
		return store.Event{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	if answer := m.ask(t, list); !strings.Contains(answer, "token") {
		t.Errorf("a call after the session's end = %s, want a refusal", answer)
	}
}
