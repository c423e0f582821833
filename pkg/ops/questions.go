package ops

import (
	"context"
	"net/http"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Question is what an agent or a script waits for a person to answer.
type Question struct {
	store.Question
	Name string `json:"session_name"`
	Repo string `json:"repo" doc:"The repository as a user names it, with the session's label."`
	Task string `json:"task,omitempty" doc:"The task that owns the session."`
}

// QuestionList lists questions, the oldest first.
type QuestionList struct {
	Questions []Question `json:"questions" nullable:"false"`
}

// Requests for operations on questions.
type (
	QuestionPath struct {
		ID string `path:"id" minLength:"12" maxLength:"12" pattern:"^[0-9a-f]{12}$" doc:"Id of the question."`
	}
	QuestionQuery struct {
		Session string `query:"session" maxLength:"12" doc:"Only questions of the session with this id."`
		All     bool   `query:"all" doc:"Also questions that have ended, as far as they are kept."`
	}
	FindQuestionRequest struct {
		What   string `query:"what" required:"true" maxLength:"4096" doc:"Id of a question or the start of it, or what names a session that asks only one."`
		Answer bool   `query:"answer" doc:"The question is to be answered. Then one of the gateway must be named by its id, because the guest decides when it is asked."`
	}
	AnswerRequest struct {
		QuestionPath
		Body struct {
			Answer string `json:"answer" maxLength:"16000" doc:"allow or deny for a permission or a plan; another text denies it, and tells the agent what to do instead. For another question a text, or the number of a choice. With several parts, a line for each." example:"allow"`
		}
	}
)

// QuestionsPath is the path of the questions in the API.
const QuestionsPath = "/api/v1/hitl"

// Operations on questions.
var (
	ListQuestions = Operation[QuestionQuery, QuestionList]{Spec{
		ID: "listQuestions", Method: http.MethodGet, Path: QuestionsPath, Tag: "questions", Need: Read,
		Summary: "List the questions that wait for an answer",
		About:   "The texts come from guests: they are safe to print, but must not be trusted.",
	}, func(ctx context.Context, e *Engine, r *QuestionQuery) (l QuestionList, err error) {
		l.Questions = []Question{}
		list, err := e.sessions().Store.Questions(ctx, r.Session, r.All)
		if err != nil {
			return l, err
		}
		names, err := e.sessionsByID(ctx)
		if err != nil {
			return l, err
		}
		for _, q := range list {
			l.Questions = append(l.Questions, names.question(q))
		}
		return l, nil
	}}

	FindQuestion = Operation[FindQuestionRequest, Question]{Spec{
		ID: "findQuestion", Method: http.MethodGet, Path: QuestionsPath + "/find", Tag: "questions", Need: Read, Errors: []int{404, 409},
		Summary: "Find a question by what a user typed",
	}, func(ctx context.Context, e *Engine, r *FindQuestionRequest) (Question, error) {
		return e.findQuestion(ctx, r.What, r.Answer)
	}}

	GetQuestion = Operation[QuestionPath, Question]{Spec{
		ID: "getQuestion", Method: http.MethodGet, Path: QuestionsPath + "/{id}", Tag: "questions", Need: Read, Errors: []int{404},
		Summary: "Get a question, and its answer",
	}, func(ctx context.Context, e *Engine, r *QuestionPath) (Question, error) {
		q, err := e.sessions().Store.Question(ctx, r.ID)
		return e.namedQuestion(ctx, q, err)
	}}

	AnswerQuestion = Operation[AnswerRequest, Question]{Spec{
		ID: "answerQuestion", Method: http.MethodPost, Path: QuestionsPath + "/{id}/respond", Tag: "questions", Need: Admin, Errors: []int{404, 409},
		Summary: "Answer a question",
		About:   "The first answer counts; a later one gets 409. The state becomes delivered when the program that asked has taken the answer.",
	}, func(ctx context.Context, e *Engine, r *AnswerRequest) (Question, error) {
		q, err := session.Questions{Sessions: e.sessions()}.Answer(ctx, r.ID, r.Body.Answer)
		return e.namedQuestion(ctx, q, err)
	}}
)

// sessionNames holds the sessions that questions are shown with, by id.
type sessionNames map[string]session.View

func (e *Engine) sessionsByID(ctx context.Context) (sessionNames, error) {
	rows, err := e.sessions().List(ctx)
	names := sessionNames{}
	for _, s := range rows {
		names[s.ID] = s.View()
	}
	return names, err
}

func (n sessionNames) question(q store.Question) Question {
	v, ok := n[q.Session]
	if !ok { // it is gone
		return Question{Question: q, Name: q.Session}
	}
	return Question{Question: q, Name: v.Name, Repo: v.DisplayName(), Task: v.Task}
}

func (e *Engine) namedQuestion(ctx context.Context, q store.Question, err error) (Question, error) {
	if err != nil {
		return Question{}, err
	}
	names, err := e.sessionsByID(ctx)
	return names.question(q), err
}

func (e *Engine) findQuestion(ctx context.Context, what string, answer bool) (Question, error) {
	list, err := e.sessions().Store.Questions(ctx, "", true)
	if err != nil {
		return Question{}, err
	}
	var found []store.Question
	for _, q := range list {
		if q.ID == what {
			return e.namedQuestion(ctx, q, nil)
		}
		if len(what) >= 4 && q.State.Waits() && strings.HasPrefix(q.ID, what) {
			found = append(found, q)
		}
	}
	if len(found) == 0 {
		s, err := e.sessions().Find(ctx, what)
		if fail.CodeOf(err) == fail.NotFound {
			return Question{}, fail.New(fail.NotFound, "no question or session %q", short(what)).WithHint("agent-sessionizer answer")
		}
		if err != nil {
			return Question{}, err
		}
		if found, err = e.sessions().Store.Questions(ctx, s.ID, false); err != nil {
			return Question{}, err
		}
		if len(found) == 0 {
			return Question{}, fail.New(fail.Conflict, "session %s asks nothing", s.Name).WithHint("agent-sessionizer answer")
		}
		if answer && len(found) == 1 && found[0].OfGateway() {
			return Question{}, fail.New(fail.Conflict, "the question of session %s is about its %s; answer it by its id", s.Name, found[0].Kind).
				WithHint("agent-sessionizer answer %s", found[0].ID)
		}
	}
	if len(found) > 1 {
		return Question{}, fail.New(fail.Conflict, "%d questions match %q", len(found), short(what)).WithHint("agent-sessionizer answer")
	}
	return e.namedQuestion(ctx, found[0], nil)
}
