package ops

import (
	"context"
	"net/http"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// DashboardLink is an address that logs one browser in to the dashboard, once.
type DashboardLink struct {
	URL       string    `json:"url" doc:"It is a secret until it has been used."`
	ExpiresAt time.Time `json:"expires_at"`
}

// CreateDashboardLink makes a link with which a browser logs in as the caller.
var CreateDashboardLink = Operation[struct{}, DashboardLink]{Spec{
	ID: "createDashboardLink", Method: http.MethodPost, Path: "/api/v1/dashboard/links", Tag: "dashboard", Need: Admin, Errors: []int{409},
	Summary: "Create a link that opens the dashboard, once",
	About:   "The browser that opens it may do what the caller may. 409 if the server listens on no address.",
}, func(ctx context.Context, e *Engine, _ *struct{}) (DashboardLink, error) {
	if e.DashboardLink == nil {
		return DashboardLink{}, fail.New(fail.Conflict, "only serve offers a dashboard").WithHint("agent-sessionizer serve --listen 127.0.0.1:8122")
	}
	return e.DashboardLink(ctx, e.Caller)
}}
