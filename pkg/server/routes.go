package server

import (
	"context"
	"fmt"
	"mime"
	"net/http"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// route is an operation as served, with what only HTTP needs to know.
type route struct {
	ops.Spec
	content string // content type of the response if not JSON
	object  bool   // the content is nevertheless a JSON object
	ranges  bool   // supports Range and If-None-Match
}

// document is the description of the API in both forms. Few clients read it, so each
// form is written at its first request and not at each start.
type document struct {
	api        huma.API
	json, yaml func() ([]byte, error)
}

// everywhere lists the statuses that any route may return: from the middleware, from
// parameter checks, and for problems of the host.
var everywhere = []int{400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504}

// routes creates the mux and the document from the same list.
func (s *Server) routes() (*http.ServeMux, document) {
	mux := http.NewServeMux()
	formats := map[string]huma.Format{"application/json": huma.DefaultJSONFormat, "json": huma.DefaultJSONFormat}
	api := humago.New(mux, huma.Config{
		OpenAPI: &huma.OpenAPI{
			OpenAPI: "3.1.0",
			Info: &huma.Info{
				Title: "agent-sessionizer", Version: "1", License: &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"},
				Description: "Tasks and sessions of coding agents, each in its own virtual machine.",
			},
			Servers: []*huma.Server{{URL: "/", Description: "This server: a UNIX socket, or an address with bearer tokens."}},
			Tags: []*huma.Tag{
				{Name: "tasks", Description: "Unattended runs."},
				{Name: "sessions", Description: "Virtual machines of repositories."},
				{Name: "questions", Description: "What agents wait for a person to answer."},
				{Name: "network", Description: "What a session may reach."},
				{Name: "images", Description: "Disks from which virtual machines start."},
				{Name: "secrets", Description: "References to secrets, never their values."},
				{Name: "dashboard", Description: "Browsers that show the dashboard."},
				{Name: "recordings", Description: "What terminals have shown."},
				{Name: "cluster", Description: "The hosts that share tasks with this one."},
				{Name: "server", Description: "The server itself."},
			},
			Components: &huma.Components{
				Schemas: huma.NewMapRegistry("#/components/schemas/", schemaName),
				SecuritySchemes: map[string]*huma.SecurityScheme{"token": {
					Type: "http", Scheme: "bearer", Description: "Required on an address, except for a browser that logged in to the dashboard. On the socket, every client is this user and has the scope admin.",
				}},
			},
		},
		Formats: formats, DefaultFormat: "application/json", RejectUnknownQueryParameters: true,
		Transformers: []huma.Transformer{translate},
	})
	api.UseMiddleware(s.strict)
	s.taskRoutes(api)
	eventFeed{s}.eventRoutes(api)
	s.fileRoutes(api)
	s.recordingRoutes(api)
	s.sessionRoutes(api)
	s.tunnelRoute(api)
	s.serverRoutes(api)
	serve(s, api, ops.ListImages)
	serve(s, api, ops.ListSecrets)
	serve(s, api, ops.CheckSecrets)
	serve(s, api, ops.RefreshSecrets)
	serve(s, api, ops.ListQuestions)
	serve(s, api, ops.FindQuestion)
	serve(s, api, ops.GetQuestion)
	serve(s, api, ops.AnswerQuestion)
	serve(s, api, ops.GetUsage)
	serve(s, api, ops.GetBudget)
	serve(s, api, ops.SetBudget)
	serve(s, api, ops.GetDisk)
	serve(s, api, ops.ListClusterHosts)
	serve(s, api, ops.InviteHost)
	serve(s, api, ops.DrainHost)
	serve(s, api, ops.RemoveHost)
	s.dashboardRoutes(api, mux)
	s.overviewRoute(api)
	mux.Handle("POST "+mcpPath, s.mcpHandler())
	mux.Handle(ops.HostsPath+"/{name}/", s.hostHandler())

	doc := api.OpenAPI()
	for _, unused := range []string{"ErrorModel", "ErrorDetail"} {
		delete(doc.Components.Schemas.Map(), unused)
	}
	for at, item := range doc.Paths {
		if clean := strings.ReplaceAll(at, "...}", "}"); clean != at { // the router's wildcard
			delete(doc.Paths, at)
			doc.Paths[clean] = item
		}
	}
	return mux, document{api, sync.OnceValues(doc.MarshalJSON), sync.OnceValues(doc.YAML)}
}

// schemaName distinguishes types that have the same name in different packages.
func schemaName(t reflect.Type, hint string) string {
	name := huma.DefaultSchemaNamer(t, hint)
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	pkg := path.Base(t.PkgPath())
	if t.Name() == "" || pkg == "server" || pkg == "ops" || pkg == "." {
		return name
	}
	return strings.ToUpper(pkg[:1]) + pkg[1:] + name
}

type output[Result any] struct{ Body Result }

type createdOutput[Result any] struct {
	Location string `header:"Location"`
	Body     Result
}

// perform performs an operation for the client of the request that ctx belongs to.
func perform[Request, Result any](ctx context.Context, s *Server, op ops.Operation[Request, Result], in *Request) (Result, error) {
	return op.On(ctx, s.engine.As(requestOf(ctx).who.Caller), *in)
}

// serve adds the route of an operation.
func serve[Request, Result any](s *Server, api huma.API, op ops.Operation[Request, Result]) {
	register(s, api, route{Spec: op.Spec}, func(ctx context.Context, in *Request) (*output[Result], error) {
		result, err := perform(ctx, s, op, in)
		return &output[Result]{result}, err
	})
}

// created adds the route of an operation that creates something.
func created[Request any, Result interface{ Location() string }](s *Server, api huma.API, op ops.Operation[Request, Result]) {
	register(s, api, route{Spec: op.Spec}, func(ctx context.Context, in *Request) (*createdOutput[Result], error) {
		result, err := perform(ctx, s, op, in)
		return &createdOutput[Result]{result.Location(), result}, err
	})
}

// register adds a route. An error from its handler becomes a Problem.
func register[I, O any](s *Server, api huma.API, r route, handler func(context.Context, *I) (*O, error)) {
	if _, ok := reflect.TypeFor[I]().FieldByName("Body"); ok {
		r.Accepts = []string{"application/json"}
	}
	op := huma.Operation{
		OperationID: r.ID, Method: r.Method, Path: r.Path, Summary: r.Summary, Description: r.About, Tags: []string{r.Tag},
		DefaultStatus: r.Status, MaxBodyBytes: -1, BodyReadTimeout: -1, // middleware has read the body
		Responses: map[string]*huma.Response{}, Metadata: map[string]any{"route": r},
	}
	if r.Need != "" {
		op.Security = []map[string][]string{{"token": {}}}
		op.Description = strings.TrimSpace(op.Description + fmt.Sprintf("\n\nNeeds the scope `%s`.", r.Need))
	}
	errorBody := map[string]*huma.MediaType{problemType: {Schema: api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[Problem](), true, "")}}
	for _, status := range slices.Concat(everywhere, r.Errors) {
		resp := &huma.Response{Description: http.StatusText(status)}
		if status >= http.StatusBadRequest {
			resp.Content = errorBody
		}
		op.Responses[strconv.Itoa(status)] = resp
	}
	if r.content != "" {
		ok := r.Status
		if ok == 0 {
			ok = http.StatusOK
		}
		schema := &huma.Schema{Type: huma.TypeString}
		if r.object {
			schema.Type = huma.TypeObject
		}
		binary := map[string]*huma.MediaType{r.content: {Schema: schema}}
		op.Responses[strconv.Itoa(ok)] = &huma.Response{Description: http.StatusText(ok), Content: binary}
		if r.ranges {
			op.Responses["206"] = &huma.Response{Description: http.StatusText(http.StatusPartialContent), Content: binary}
		}
	}
	if r.ranges {
		op.Responses["304"] = &huma.Response{Description: http.StatusText(http.StatusNotModified)}
		for _, status := range []int{412, 416} {
			op.Responses[strconv.Itoa(status)] = &huma.Response{Description: http.StatusText(status), Content: errorBody}
		}
	}
	huma.Register(api, op, func(ctx context.Context, in *I) (*O, error) {
		out, err := handler(ctx, in)
		if err == nil {
			return out, nil
		}
		return nil, s.problemOf(ctx, err)
	})
}

// problemOf converts an error into a problem, and logs the details that the client does
// not see.
func (s *Server) problemOf(ctx context.Context, err error) *Problem {
	p := problemOf(err)
	if p.Status >= http.StatusInternalServerError && ctx.Err() == nil {
		s.log.ErrorContext(ctx, "request failed", "error", err)
	}
	return p
}

// translate converts huma's own errors into problems. It drops the invalid values,
// because they could be secrets, or a megabyte long.
func translate(ctx huma.Context, _ string, body any) (any, error) {
	switch body := body.(type) {
	case *Problem:
		p := *body
		p.TraceID = requestOf(ctx.Context()).trace
		return &p, nil
	case *huma.ErrorModel:
		p := problem(body.Status, codeInvalid, seeDocs, "%s", body.Detail)
		switch body.Status {
		case http.StatusUnsupportedMediaType:
			p.Code = codeMediaType
		case http.StatusInternalServerError:
			p.Code, p.Detail = codeInternal, "internal error of serve"
		}
		for _, e := range body.Errors {
			if e != nil && len(p.Errors) < 20 {
				p.Errors = append(p.Errors, bounded(strings.TrimPrefix(e.Location+": "+e.Message, ": ")))
			}
		}
		p.TraceID = requestOf(ctx.Context()).trace
		return p, nil
	}
	return body, nil
}

// strict checks what the document specifies for a route but huma does not check:
// the scope, the method, that no parameter is repeated, whether there is a body,
// and its type.
func (s *Server) strict(ctx huma.Context, next func(huma.Context)) {
	req := requestOf(ctx.Context())
	if p := req.check(ctx.Operation().Metadata["route"].(route)); p != nil {
		req.w.fail(p)
		return
	}
	next(ctx)
}

func (req *request) check(r route) *Problem {
	if err := req.who.Check(r.Spec); err != nil {
		return problemOf(err)
	}
	for name, values := range req.r.URL.Query() {
		if len(values) > 1 {
			return problem(http.StatusBadRequest, codeInvalid, "send it once, with commas between values", "parameter %s was sent more than once", name)
		}
		if slices.Contains(values, "") {
			return problem(http.StatusBadRequest, codeInvalid, "leave it out, or give it a value", "parameter %s is empty", name)
		}
	}
	if len(r.Accepts) == 0 {
		if req.r.ContentLength != 0 {
			return problem(http.StatusBadRequest, codeInvalid, "leave the body out", "%s accepts no body", r.ID)
		}
		return nil
	}
	kind, params, err := mime.ParseMediaType(req.r.Header.Get("Content-Type"))
	charset := strings.ToLower(params["charset"])
	if err != nil || !slices.Contains(r.Accepts, kind) || charset != "" && charset != "utf-8" {
		return problem(http.StatusUnsupportedMediaType, codeMediaType, "send Content-Type: "+strings.Join(r.Accepts, " or "), "the body's Content-Type is not accepted here; it must be UTF-8")
	}
	if req.r.ContentLength == 0 {
		return problem(http.StatusBadRequest, codeInvalid, seeDocs, "the body is missing")
	}
	return nil
}
