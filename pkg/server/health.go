package server

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// Health is the server's health. It is public.
type Health struct {
	Status string `json:"status" enum:"ok"`
}

type healthOutput struct{ Body Health }

// healthTimeout bounds the store's answer. It is less than half of the watchdog
// interval in the units.
const healthTimeout = 5 * time.Second

func (s *Server) serverRoutes(api huma.API) {
	register(s, api, route{Spec: ops.Spec{
		ID: "getHealth", Method: http.MethodGet, Path: healthPath, Tag: "server",
		Summary: "Check that the server works",
		About:   "Reads the store; 503 means that this failed. Needs no token.",
	}}, func(ctx context.Context, _ *struct{}) (*healthOutput, error) {
		ctx, cancel := context.WithTimeout(ctx, healthTimeout)
		defer cancel()
		if _, err := s.store.TaskCounts(ctx); err != nil {
			s.log.ErrorContext(ctx, "failed to read store", "error", err)
			return nil, problem(http.StatusServiceUnavailable, codeUnavailable, "agent-sessionizer doctor", "the store cannot be read").with("Retry-After", "5")
		}
		return &healthOutput{Health{"ok"}}, nil
	})
	register(s, api, route{Spec: ops.Spec{
		ID: "getMetrics", Method: http.MethodGet, Path: "/metrics", Tag: "server", Need: ops.Read,
		Summary: "Get metrics for Prometheus",
	}, content: "text/plain"}, func(ctx context.Context, _ *struct{}) (*bodyOutput, error) {
		req := requestOf(ctx)
		return &bodyOutput{func(huma.Context) { s.metrics.handler.ServeHTTP(req.w, req.r) }}, nil
	})
	static := func(id, path, kind, summary string, text func() ([]byte, error)) {
		register(s, api, route{Spec: ops.Spec{ID: id, Method: http.MethodGet, Path: path, Tag: "server", Need: ops.Read, Summary: summary}, content: kind, object: strings.HasSuffix(kind, "+json")},
			func(context.Context, *struct{}) (*bodyOutput, error) {
				body, err := text()
				return &bodyOutput{func(ctx huma.Context) {
					ctx.SetHeader("Content-Type", kind)
					ctx.SetStatus(http.StatusOK)
					_, _ = ctx.BodyWriter().Write(body) // the client is gone if this fails
				}}, err
			})
	}
	static("getManifestSchema", "/api/v1/manifest/schema", "application/schema+json", "Get the JSON Schema of manifests", func() ([]byte, error) { return manifest.Schema(), nil })
	static("getDocument", "/openapi.json", "application/vnd.oai.openapi+json", "Get this document", func() ([]byte, error) { return s.doc.json() })
	static("getDocumentYAML", "/openapi.yaml", "application/vnd.oai.openapi", "Get this document as YAML", func() ([]byte, error) { return s.doc.yaml() })
}

// notify sends a state to systemd, if systemd started this process and expects it.
func (s *Server) notify(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		s.log.Warn("failed to notify systemd", "state", state, "error", err)
	}
}

// watchdog notifies systemd at intervals. It does so only if a request succeeds on
// the whole path through the socket, the middleware and the router to the store.
func (s *Server) watchdog(ctx context.Context, socket string) {
	every, err := daemon.SdWatchdogEnabled(false)
	if err != nil || every == 0 {
		return
	}
	tick := time.NewTicker(every / 3)
	defer tick.Stop()
	client := &http.Client{
		Timeout: every / 3,
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}},
	}
	for {
		if err := probe(ctx, client); err == nil {
			s.notify("WATCHDOG=1")
		} else if ctx.Err() == nil {
			s.log.Error("watchdog probe failed", "error", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func probe(ctx context.Context, client *http.Client) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+healthPath, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("health check returned %s", resp.Status)
	}
	return nil
}
