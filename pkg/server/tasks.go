package server

import (
	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

func (s *Server) taskRoutes(api huma.API) {
	created(s, api, ops.SubmitTask)
	serve(s, api, ops.ListTasks)
	serve(s, api, ops.CheckTask)
	serve(s, api, ops.FindTask)
	serve(s, api, ops.GetTask)
	serve(s, api, ops.CancelTask)
	serve(s, api, ops.DestroyTask)
	created(s, api, ops.RetryTask)

	// Document all forms of submitTask's request body; huma knows only the raw one.
	op := api.OpenAPI().Paths[ops.TasksPath].Post
	text := &huma.MediaType{Schema: &huma.Schema{Type: huma.TypeString, Description: "A manifest; GET /api/v1/manifest/schema describes it."}}
	op.RequestBody.Content = map[string]*huma.MediaType{
		"application/yaml": text, "application/x-yaml": text, "text/yaml": text,
		"application/json": {Schema: &huma.Schema{OneOf: []*huma.Schema{
			{Type: huma.TypeObject, Description: "A manifest; GET /api/v1/manifest/schema describes it.", Required: []string{"version", "kind"}},
			{
				Type: huma.TypeObject, Description: "A manifest's YAML.", Required: []string{"manifest_yaml"}, AdditionalProperties: false,
				Properties: map[string]*huma.Schema{"manifest_yaml": {Type: huma.TypeString}},
			},
		}}},
	}
}
